// Ranks that reach each other by TCP, here threads of one process on the loopback.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "comm/message_communicator.h"
#include "comm/socket_address.h"
#include "comm/socket_transport.h"
#include "host/host_backend.h"
#include "host/host_queue.h"
#include "orlop/error.h"
#include "tests/comm/communicator_suite.h"
#include "tests/support/sanitized.h"

namespace orlop {
namespace {

// One thread per rank; each is given how to join the others.
void run_threads(int ranks, const std::function<void(const SocketOptions&)>& body) {
  UniqueFd listener = listen_at(resolve("127.0.0.1:0").front());
  SocketOptions options{.world_size = ranks,
                        .rendezvous = SocketAddress::own(listener.get()).text(),
                        .join_seconds = 60};
  std::vector<std::thread> threads;
  for (int rank = ranks - 1; rank >= 0; --rank) {
    options.rank = rank;
    options.listener = rank == 0 ? std::exchange(listener, UniqueFd()).release() : -1;
    threads.emplace_back(body, options);
  }
  for (std::thread& thread : threads) thread.join();
}

void issue(Queue& queue, const CollectiveCall& call) {
  host::host_queue(queue).enqueue(collective_name(call.id.kind), call);
}

void run_ranks(int ranks, const std::function<void(Communicator&, Queue&)>& body,
               MessageOptions options = {}) {
  options.issue = issue;
  run_threads(ranks, [&](const SocketOptions& sockets) {
    const std::unique_ptr<Backend> backend =
        make_host_backend({.device_bytes = 4 * kMiB, .threads = 1, .reference_ops = true});
    MessageCommunicator comm(options, [&] {
      return std::make_unique<SocketTransport>(sockets, MessageCommunicator::kLanes);
    });
    body(comm, backend->queue(QueueKind::kComm));
  });
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCommunicator) << error.what();
    return error.what();
  }
  return "no error";
}

class SocketCommunicatorTest : public testing::TestWithParam<int> {};

TEST_P(SocketCommunicatorTest, DoesWhatEveryCommunicatorDoes) {
  run_ranks(GetParam(), [](Communicator& comm, Queue& queue) {
    test::expect_all_gather(comm, queue);
    test::expect_reduce_scatter(comm, queue);
    test::expect_sixteen_bit_sums_round_once(comm, queue);
    test::expect_all_to_all(comm, queue);
    test::expect_broadcast(comm, queue);
    test::expect_host_values_beside_the_queue(comm, queue);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SocketCommunicatorTest, testing::Values(2, 3, 4));

// More than the kernel takes, while one rank comes late.
TEST(SocketCommunicator, CarriesWhatNoBufferHolds) {
  constexpr size_t kCount = (size_t{3} << 20) + 3;
  const auto value = [](size_t rank, size_t i) {
    return static_cast<float>(rank * 1000 + i % 997);  // sums of three are exact
  };
  run_ranks(3, [&](Communicator& comm, Queue& queue) {
    const size_t own = static_cast<size_t>(comm.rank());
    std::vector<float> send(kCount), all(3 * kCount), sum(kCount);
    for (size_t i = 0; i < kCount; ++i) send[i] = value(own, i);
    if (own == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    comm.all_gather(queue, send.data(), all.data(), kCount, DType::kF32, "test");
    comm.reduce_scatter(queue, all.data(), sum.data(), kCount, DType::kF32, "test");
    queue.synchronize();
    size_t wrong = 0;
    for (size_t rank = 0; rank < 3; ++rank) {
      for (size_t i = 0; i < kCount; ++i) wrong += all[rank * kCount + i] != value(rank, i);
    }
    // Every rank has given the same rows: its own three times.
    for (size_t i = 0; i < kCount; ++i) wrong += sum[i] != 3 * value(own, i);
    EXPECT_EQ(wrong, 0u) << "rank " << own;
  });
}

// Case N-10: a weight of 5 MiB and one element, in parts that are aligned: what pads the last of
// them is NaN, and stays where it is.
TEST(SocketCommunicator, PaddingOfALargeWeightNeverBecomesPartOfASum) {
  constexpr size_t kNumel = (size_t{5} << 18) + 1;
  constexpr size_t kPart = (kNumel / 3 + 128) / 128 * 128;
  static_assert(3 * kPart > kNumel);
  run_ranks(3, [&](Communicator& comm, Queue& queue) {
    const auto own = static_cast<size_t>(comm.rank());
    std::vector<float> gradient(3 * kPart, std::numeric_limits<float>::quiet_NaN());
    std::vector<float> sum(kPart, std::numeric_limits<float>::quiet_NaN());
    for (size_t i = 0; i < kNumel; ++i) gradient[i] = static_cast<float>((own + 1) * (i % 997));
    comm.reduce_scatter(queue, gradient.data(), sum.data(), kPart, DType::kF32, "test");
    queue.synchronize();
    size_t wrong = 0;
    for (size_t i = own * kPart; i < std::min((own + 1) * kPart, kNumel); ++i) {
      wrong += sum[i - own * kPart] != static_cast<float>(6 * (i % 997)) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0u) << "rank " << own;
  });
}

TEST(SocketCommunicator, RanksThatDisagreeAreToldHow) {
  std::atomic<int> told{0};
  run_ranks(3, [&](Communicator& comm, Queue& queue) {
    std::vector<float> send(60), recv(180);
    comm.all_gather(queue, send.data(), recv.data(), comm.rank() == 2 ? 9 : 10, DType::kF32, "x");
    const std::string message = error_of([&] { queue.synchronize(); });
    EXPECT_THAT(message, testing::AllOf(testing::HasSubstr("rank 0 calls all_gather of 10 F32"),
                                        testing::HasSubstr("rank 2 calls all_gather of 9 F32")));
    EXPECT_FALSE(comm.failure().empty());
    ++told;
  });
  EXPECT_EQ(told, 3);
}

TEST(SocketCommunicator, AnAbortIsToldWithItsReason) {
  std::atomic<int> told{0};
  run_ranks(3, [&](Communicator& comm, Queue&) {
    // Some may still be in the first barrier when another one, out of it, gives up.
    const auto meet_twice = [&] {
      comm.barrier("start");
      if (comm.rank() == 1) comm.abort("out of paper");
      comm.barrier("step");
    };
    EXPECT_THAT(error_of(meet_twice), testing::HasSubstr("rank 1 has failed: out of paper"));
    ++told;
  });
  EXPECT_EQ(told, 3);
}

TEST(SocketCommunicator, WhoIsWaitedForTooLongIsNamed) {
  run_ranks(3,
            [](Communicator& comm, Queue&) {
              comm.barrier("start");
              if (comm.rank() == 2) {
                std::this_thread::sleep_for(std::chrono::seconds(2));
              } else {
                EXPECT_THAT(error_of([&] { comm.barrier("step"); }),
                            testing::AllOf(testing::HasSubstr("all_gather of 0 U8 (step)"),
                                           testing::HasSubstr("for rank 2")));
              }
            },
            {.timeout_seconds = 1});
}

TEST(SocketTransport, KeepsTheOrderOfEveryLaneAndSize) {
  constexpr int kLanes = 2;
  const std::vector<size_t> sizes = {0, 1, 7, 0, 4096, 65537, (size_t{3} << 20) + 1, 3};
  run_threads(3, [&](const SocketOptions& options) {
    SocketTransport transport(options, kLanes);
    struct Message {
      std::vector<std::byte> bytes;
      std::byte want{};
      Transport::Request request = 0;
      bool done = false;
    };
    std::vector<Message> messages;
    messages.reserve(4 * kLanes * sizes.size());
    const auto value = [](int rank, int lane, size_t number) {
      return static_cast<std::byte>(rank * 50 + lane * 20 + static_cast<int>(number) + 1);
    };
    for (size_t number = 0; number < sizes.size(); ++number) {
      for (int peer = 0; peer < 3; ++peer) {
        for (int lane = 0; lane < kLanes && peer != options.rank; ++lane) {
          Message& in = messages.emplace_back();
          in.bytes.resize(sizes[number]);
          in.want = value(peer, lane, number);
          in.request = transport.receive(peer, lane, in.bytes.data(), in.bytes.size());
          Message& out = messages.emplace_back();
          out.want = value(options.rank, lane, number);
          out.bytes.resize(sizes[number], out.want);
          out.request = transport.send(peer, lane, out.bytes.data(), out.bytes.size());
        }
      }
    }
    for (size_t done = 0; done < messages.size();) {
      transport.wait(std::chrono::seconds(10), true);
      for (Message& message : messages) {
        if (message.done || !transport.test(message.request)) continue;
        message.done = true;
        ++done;
      }
    }
    for (const Message& message : messages) {
      for (const std::byte byte : message.bytes) ASSERT_EQ(byte, message.want);
    }
  });
}

void wait_until(Transport& transport, const std::function<bool()>& done) {
  const auto end = Transport::Clock::now() + std::chrono::seconds(30);
  while (!done()) {
    ASSERT_LT(Transport::Clock::now(), end);
    transport.wait(std::chrono::milliseconds(50), true);
  }
}

TEST(SocketTransport, ALaneThatIsFullHoldsNoOtherUp) {
  run_threads(2, [](const SocketOptions& options) {
    SocketTransport transport(options, 2);
    const int peer = 1 - options.rank;
    std::vector<std::byte> much(64 * kMiB), little(8), arrived(8);
    const auto stuck = transport.send(peer, 0, much.data(), much.size());
    const auto sent = transport.send(peer, 1, little.data(), little.size());
    const auto received = transport.receive(peer, 1, arrived.data(), arrived.size());
    wait_until(transport, [&] { return transport.test(received); });
    EXPECT_TRUE(transport.test(sent));
    EXPECT_FALSE(transport.test(stuck));
    const auto taken = transport.receive(peer, 0, much.data(), much.size());
    bool is_taken = false;
    bool is_sent = false;
    wait_until(transport, [&] {
      is_taken = is_taken || transport.test(taken);
      is_sent = is_sent || transport.test(stuck);
      return is_taken && is_sent;
    });
  });
}

TEST(SocketTransport, GivesTheLastWordsOfARankBeforeItIsLost) {
  run_threads(2, [](const SocketOptions& options) {
    SocketTransport transport(options, 2);
    const std::vector<std::byte> words(100'000, std::byte{7});
    if (options.rank == 1) {
      const auto sent = transport.send(0, 1, words.data(), words.size());
      wait_until(transport, [&] { return transport.test(sent); });
      return;  // closes
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::vector<std::byte> heard(words.size());
    const auto received = transport.receive(1, 1, heard.data(), heard.size());
    wait_until(transport, [&] { return transport.test(received); });
    EXPECT_EQ(heard, words);
    EXPECT_FALSE(transport.lost_since(1, 1));
    const auto more = transport.receive(1, 1, heard.data(), 1);
    wait_until(transport, [&] { return transport.lost_since(1, 1).has_value(); });
    EXPECT_FALSE(transport.test(more));
  });
}

TEST(SocketTransport, TouchesNothingThatWasGivenUp) {
  run_threads(2, [](const SocketOptions& options) {
    SocketTransport transport(options, 2);
    const int peer = 1 - options.rank;
    std::vector<std::byte> own(10, std::byte{1}), buffer(20, std::byte{2}), go(1);
    const auto meet = [&] {
      const auto sent = transport.send(peer, 1, go.data(), 1);
      const auto received = transport.receive(peer, 1, go.data(), 1);
      wait_until(transport, [&] { return transport.test(received); });
      wait_until(transport, [&] { return transport.test(sent); });
    };
    if (options.rank == 0) {
      const auto half = transport.receive(1, 0, buffer.data(), buffer.size());
      meet();
      wait_until(transport, [&] { return buffer[9] == std::byte{1}; });
      transport.cancel(half);
      transport.cancel(half);
      meet();
      meet();
      EXPECT_EQ(buffer[10], std::byte{2});
      return;
    }
    const auto first = transport.send(0, 0, own.data(), own.size());
    wait_until(transport, [&] { return transport.test(first); });
    meet();
    meet();
    const auto second = transport.send(0, 0, own.data(), own.size());
    wait_until(transport, [&] { return transport.test(second); });
    meet();
  });
}

// `bytes` of address space whose pages are `page_bytes` of memory, again and again.
std::byte* map_again_and_again(size_t bytes, size_t page_bytes) {
  const UniqueFd memory(::memfd_create("pages", MFD_CLOEXEC));
  if (::ftruncate(memory.get(), static_cast<off_t>(page_bytes)) != 0) return nullptr;
  void* range = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (range == MAP_FAILED) return nullptr;
  auto* first = static_cast<std::byte*>(range);
  for (size_t at = 0; at < bytes; at += page_bytes) {
    ::mmap(first + at, std::min(page_bytes, bytes - at), PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED, memory.get(), 0);
  }
  return first;
}

TEST(SocketTransport, CarriesMoreThanTwoGiBAtOnce) {
  if (test::kSanitized) GTEST_SKIP() << "the sanitizer would shadow every page";
  constexpr size_t kPage = 32 * kMiB;
  constexpr size_t kBytes = (size_t{2} << 30) + kPage / 2;
  run_threads(2, [](const SocketOptions& options) {
    SocketTransport transport(options, 1);
    std::byte* bytes = map_again_and_again(kBytes, kPage);
    ASSERT_NE(bytes, nullptr);
    if (options.rank == 0) std::memset(bytes, 0x5A, kPage);
    const auto request = options.rank == 0 ? transport.send(1, 0, bytes, kBytes)
                                           : transport.receive(0, 0, bytes, kBytes);
    bool done = false;
    while (!done) {
      transport.wait(std::chrono::seconds(20), true);
      done = transport.test(request);
    }
    EXPECT_EQ(bytes[kBytes - 1], std::byte{0x5A});
    ::munmap(bytes, kBytes);
    // Neither closes before the other has all.
    const auto farewell =
        options.rank == 0 ? transport.receive(1, 0, &done, 1) : transport.send(0, 0, &done, 1);
    while (!transport.test(farewell)) transport.wait(std::chrono::seconds(20), true);
  });
}

}  // namespace
}  // namespace orlop
