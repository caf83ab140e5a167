// How ranks find each other by sockets, and what they are told when they do not.

#include "comm/socket_rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/socket_reception.h"
#include "orlop/error.h"

namespace orlop {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;

constexpr int kLanes = 3;

// Runs join_by_sockets() on threads and keeps what came of it.
class Meeting {
 public:
  explicit Meeting(const std::string& place = "127.0.0.1:0")
      : listener_(listen_at(resolve(place).front())),
        place_(SocketAddress::own(listener_.get()).text()) {}
  ~Meeting() { wait(); }

  const std::string& place() const { return place_; }
  void set_place(const std::string& place) { place_ = place; }
  void stop_listening() { listener_.reset(); }

  void add(int rank, int world_size, double join_seconds = 30) {
    SocketOptions options{.rank = rank,
                          .world_size = world_size,
                          .rendezvous = place_,
                          .listener = rank == 0 ? listener_.release() : -1,
                          .join_seconds = join_seconds};
    threads_.emplace_back([this, options] {
      std::string error;
      try {
        check_links(options, join_by_sockets(options, kLanes));
      } catch (const Error& thrown) {
        error = thrown.what();
      }
      std::lock_guard lock(mutex_);
      errors_.push_back(error);
    });
  }

  // What each rank was told; "" for one that has joined.
  std::vector<std::string> wait() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    return errors_;
  }

 private:
  // Every lane leads to the rank and the lane that it should.
  static void check_links(const SocketOptions& options, const SocketLinks& links) {
    const auto end = SocketClock::now() + std::chrono::seconds(20);
    for (int pass : {0, 1}) {
      for (int r = 0; r < options.world_size; ++r) {
        for (int lane = 0; lane < kLanes && r != options.rank; ++lane) {
          const int fd = links[static_cast<size_t>(r)][static_cast<size_t>(lane)].get();
          std::array<int, 2> name{options.rank, lane};
          if (pass == 0) {
            ASSERT_TRUE(send_all(fd, name.data(), sizeof name, end));
          } else {
            ASSERT_TRUE(receive_all(fd, name.data(), sizeof name, end));
            EXPECT_THAT(name, testing::ElementsAre(r, lane));
          }
        }
      }
    }
  }

  UniqueFd listener_;
  std::string place_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::vector<std::string> errors_;
};

// A connection to the place by somebody else.
UniqueFd visit(const std::string& place, const void* words, size_t bytes) {
  const auto end = SocketClock::now() + std::chrono::seconds(10);
  UniqueFd fd = connect_to(resolve(place).front(), end);
  EXPECT_TRUE(fd && send_all(fd.get(), words, bytes, end));
  return fd;
}

TEST(SocketRendezvousTest, JoinsAnyNumberOfRanks) {
  for (const int ranks : {2, 3, 5, 8}) {
    Meeting meeting;
    for (int rank = ranks - 1; rank >= 0; --rank) meeting.add(rank, ranks);
    EXPECT_THAT(meeting.wait(), AllOf(testing::SizeIs(ranks), Each("")));
  }
}

TEST(SocketRendezvousTest, JoinsByIpv6AndByName) {
  try {
    Meeting meeting("[::1]:0");
    for (const int rank : {0, 1, 2}) meeting.add(rank, 3);
    EXPECT_THAT(meeting.wait(), Each(""));
  } catch (const Error& error) {
    GTEST_SKIP() << "no IPv6 here: " << error.what();
  }
  Meeting meeting;
  meeting.set_place("localhost:" + meeting.place().substr(meeting.place().rfind(':') + 1));
  for (const int rank : {0, 1}) meeting.add(rank, 2);
  EXPECT_THAT(meeting.wait(), Each(""));
}

TEST(SocketRendezvousTest, RanksWaitForTheFirst) {
  Meeting meeting;
  meeting.stop_listening();
  for (const int rank : {1, 2}) meeting.add(rank, 3);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  meeting.add(0, 3);  // listens by itself
  EXPECT_THAT(meeting.wait(), Each(""));
}

TEST(SocketRendezvousTest, StrangersHarmNobody) {
  Meeting meeting;
  const std::string request = "GET / HTTP/1.1\r\nHost: orlop\r\n\r\n" + std::string(4096, 'x');
  const Hello hello = make_hello(1, 3, Hello::kNoLane, 1);
  std::vector<UniqueFd> strangers;
  strangers.push_back(visit(meeting.place(), "", 0));
  strangers.push_back(visit(meeting.place(), request.data(), request.size()));
  strangers.push_back(visit(meeting.place(), &hello, 12));
  visit(meeting.place(), &hello, 20);  // gone at once
  visit(meeting.place(), "", 0);
  meeting.add(0, 3);
  meeting.add(1, 3);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  strangers.push_back(visit(meeting.place(), request.data(), request.size()));
  meeting.add(2, 3);
  EXPECT_THAT(meeting.wait(), AllOf(testing::SizeIs(3), Each("")));
}

TEST(SocketRendezvousTest, RanksThatDoNotComeAreNamed) {
  Meeting meeting;
  meeting.add(0, 4, 1);
  meeting.add(2, 4, 1);
  EXPECT_THAT(meeting.wait(),
              AllOf(testing::SizeIs(2), Each(HasSubstr("ranks 1, 3 of 4 have not come to " +
                                                       meeting.place() + " within 1 s"))));
}

TEST(SocketRendezvousTest, AFirstRankThatDoesNotComeIsNamed) {
  Meeting meeting;
  meeting.stop_listening();
  meeting.add(1, 2, 0.5);
  EXPECT_THAT(
      meeting.wait(),
      testing::ElementsAre(HasSubstr("rank 1 of 2 has not reached rank 0 at " + meeting.place())));
}

TEST(SocketRendezvousTest, ARankThatComesTwiceIsAnErrorOfAll) {
  Meeting meeting;
  meeting.add(0, 3);
  meeting.add(1, 3);
  meeting.add(1, 3);
  EXPECT_THAT(meeting.wait(),
              AllOf(testing::SizeIs(3), Each(HasSubstr("rank 1 has come twice, from "))));
}

TEST(SocketRendezvousTest, AnotherWorldSizeIsAnErrorOfAll) {
  Meeting meeting;
  meeting.add(0, 3);
  meeting.add(1, 3);
  meeting.add(2, 4);
  EXPECT_THAT(meeting.wait(),
              AllOf(testing::SizeIs(3), Each(AllOf(HasSubstr("rank 2 (127.0.0.1:"),
                                                   HasSubstr("a run of 4 ranks, rank 0 to one of "
                                                             "3")))));
}

TEST(SocketRendezvousTest, AnotherVersionIsAnErrorOfAll) {
  Meeting meeting;
  meeting.add(0, 3);
  meeting.add(1, 3);
  Hello hello = make_hello(2, 3, Hello::kNoLane, 1);
  hello.version = {'9', '.', '9'};
  const UniqueFd other = visit(meeting.place(), &hello, sizeof hello);
  EXPECT_THAT(meeting.wait(), AllOf(testing::SizeIs(2), Each(HasSubstr("runs Orlop 9.9, rank 0 "
                                                                       "runs "))));
  std::array<char, 1024> answer{};
  ASSERT_TRUE(receive_all(other.get(), answer.data(), answer.size(),
                          SocketClock::now() + std::chrono::seconds(10)));
  EXPECT_THAT(std::string(answer.data() + 4), HasSubstr("runs Orlop 9.9"));
}

TEST(SocketRendezvousTest, ARankThatEndsWhileJoiningIsNamed) {
  Meeting meeting;
  meeting.add(0, 3);
  meeting.add(1, 3);
  const Hello hello = make_hello(2, 4, Hello::kNoLane, 1);
  Hello right = hello;
  right.world_size = 3;
  right.rank = 2;
  UniqueFd last = visit(meeting.place(), &right, sizeof right);
  last.reset();
  // It may be noticed before the others are told of it, or when they look for it.
  EXPECT_THAT(meeting.wait(), AllOf(testing::SizeIs(2), Each(HasSubstr("rank 2"))));
}

TEST(SocketRendezvousTest, AFirstRankThatEndsIsNamed) {
  const UniqueFd listener = listen_at(resolve("127.0.0.1:0").front());
  Meeting meeting;
  meeting.stop_listening();
  meeting.set_place(SocketAddress::own(listener.get()).text());
  meeting.add(1, 2);
  Reception reception(UniqueFd(::dup(listener.get())));
  std::optional<int> unused;
  auto guest = reception.next(SocketClock::now() + std::chrono::seconds(10), {}, unused);
  ASSERT_TRUE(guest);
  EXPECT_EQ(guest->hello.rank, 1);
  guest->fd.reset();
  EXPECT_THAT(meeting.wait(), Each(HasSubstr("has ended while the ranks were joining")));
}

TEST(SocketRendezvousTest, RefusesADescriptorThatDoesNotListen) {
  for (const int fd : {0, 12345}) {
    try {
      join_by_sockets({.rank = 0, .world_size = 2, .rendezvous = "127.0.0.1:1", .listener = fd},
                      kLanes);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr("is no socket that listens"));
    }
  }
}

}  // namespace
}  // namespace orlop
