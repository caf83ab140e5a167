#include "tests/comm/communicator_suite.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "base/half.h"

namespace orlop::test {
namespace {

// One beyond a MiB: more than one piece of any implementation.
constexpr size_t kCounts[] = {0, 1, 7, 1000, (size_t{1} << 18) + 1};

size_t ranks_of(const Communicator& comm) { return static_cast<size_t>(comm.world_size()); }

}  // namespace

std::vector<float> values_of_rank(int rank, size_t numel) {
  std::mt19937 random(100 + static_cast<unsigned>(rank));
  std::uniform_real_distribution<float> mantissa(-1.0f, 1.0f);
  std::uniform_int_distribution<int> exponent(-6, 6);
  std::vector<float> values(numel);
  for (float& value : values) value = std::ldexp(mantissa(random), exponent(random));
  return values;
}

void expect_all_gather(Communicator& comm, Queue& queue) {
  for (const size_t count : kCounts) {
    const std::vector<float> send = values_of_rank(comm.rank(), count);
    std::vector<float> recv(count * ranks_of(comm), -7.0f), want;
    for (int r = 0; r < comm.world_size(); ++r) {
      const std::vector<float> row = values_of_rank(r, count);
      want.insert(want.end(), row.begin(), row.end());
    }
    const int64_t numel = static_cast<int64_t>(count);
    comm.all_gather(queue, send.data(), recv.data(), numel, DType::kF32, "test");
    queue.synchronize();
    EXPECT_EQ(recv, want) << "rank " << comm.rank() << ", count " << count;

    std::vector<float> in_place(count * ranks_of(comm), -7.0f);
    float* row = in_place.data() + static_cast<size_t>(comm.rank()) * count;
    std::copy(send.begin(), send.end(), row);
    comm.all_gather(queue, row, in_place.data(), numel, DType::kF32, "test");
    queue.synchronize();
    EXPECT_EQ(in_place, want) << "in place, rank " << comm.rank() << ", count " << count;
  }
}

void expect_reduce_scatter(Communicator& comm, Queue& queue) {
  for (const size_t count : kCounts) {
    const size_t begin = static_cast<size_t>(comm.rank()) * count;
    std::vector<float> want(count);
    for (int r = 0; r < comm.world_size(); ++r) {
      const std::vector<float> other = values_of_rank(r, count * ranks_of(comm));
      for (size_t i = 0; i < count; ++i) {
        want[i] = r == 0 ? other[begin + i] : want[i] + other[begin + i];
      }
    }
    const int64_t numel = static_cast<int64_t>(count);
    std::vector<float> send = values_of_rank(comm.rank(), count * ranks_of(comm)), recv(count);
    const std::vector<float> before = send;
    comm.reduce_scatter(queue, send.data(), recv.data(), numel, DType::kF32, "test");
    comm.reduce_scatter(queue, send.data(), send.data() + begin, numel, DType::kF32, "test");
    queue.synchronize();
    EXPECT_EQ(recv, want) << "rank " << comm.rank() << ", count " << count;
    for (size_t i = 0; i < send.size(); ++i) {
      const bool own = i >= begin && i < begin + count;
      ASSERT_EQ(send[i], own ? want[i - begin] : before[i])
          << "in place, rank " << comm.rank() << ", count " << count << ", element " << i;
    }
  }
}

void expect_sixteen_bit_sums_round_once(Communicator& comm, Queue& queue) {
  constexpr size_t kCount = 200;
  struct Format {
    DType dtype;
    float (*load)(uint16_t);
    uint16_t (*store)(float);
  };
  for (const Format& format : {Format{DType::kBF16, bf16_to_float, float_to_bf16},
                               Format{DType::kF16, fp16_to_float, float_to_fp16}}) {
    const auto packed = [&](int rank) {
      std::vector<uint16_t> values;
      for (const float value : values_of_rank(rank, kCount * ranks_of(comm))) {
        values.push_back(format.store(value));
      }
      return values;
    };
    const std::vector<uint16_t> send = packed(comm.rank());
    std::vector<uint16_t> recv(kCount);
    comm.reduce_scatter(queue, send.data(), recv.data(), kCount, format.dtype, "test");
    queue.synchronize();
    std::vector<float> sums(kCount, 0.0f);
    for (int r = 0; r < comm.world_size(); ++r) {
      const std::vector<uint16_t> other = packed(r);
      for (size_t i = 0; i < kCount; ++i) {
        sums[i] += format.load(other[static_cast<size_t>(comm.rank()) * kCount + i]);
      }
    }
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(recv[i], format.store(sums[i])) << i;
  }
}

void expect_all_to_all(Communicator& comm, Queue& queue) {
  comm.prepare_all_to_all();
  for (const size_t count : kCounts) {
    const std::vector<float> send = values_of_rank(comm.rank(), count * ranks_of(comm));
    std::vector<float> recv(send.size(), -7.0f), want;
    for (int r = 0; r < comm.world_size(); ++r) {
      const std::vector<float> other = values_of_rank(r, count * ranks_of(comm));
      const auto row = other.begin() + static_cast<std::ptrdiff_t>(count) * comm.rank();
      want.insert(want.end(), row, row + static_cast<std::ptrdiff_t>(count));
    }
    comm.all_to_all(queue, send.data(), recv.data(), static_cast<int64_t>(count), DType::kF32,
                    "test");
    queue.synchronize();
    EXPECT_EQ(recv, want) << "rank " << comm.rank() << ", count " << count;
  }
}

void expect_broadcast(Communicator& comm, Queue& queue) {
  for (int root = 0; root < comm.world_size(); ++root) {
    std::vector<float> buffer = values_of_rank(comm.rank(), 33);
    comm.broadcast(queue, buffer.data(), 33, DType::kF32, root, "test");
    queue.synchronize();
    EXPECT_EQ(buffer, values_of_rank(root, 33));
    std::vector<float> values = values_of_rank(comm.rank(), 5);
    comm.broadcast_values(std::as_writable_bytes(std::span(values)), root, "test");
    EXPECT_EQ(values, values_of_rank(root, 5));
  }
}

void expect_host_values_beside_the_queue(Communicator& comm, Queue& queue) {
  std::vector<float> send = values_of_rank(comm.rank(), 50), recv(50 * ranks_of(comm));
  for (int round = 0; round < 50; ++round) {
    comm.all_gather(queue, send.data(), recv.data(), 50, DType::kF32, "test");
    std::vector<double> sums(3), want(3);
    const auto value = [&](int rank, size_t i) {
      return std::pow(10.0, rank * 5 - 8) * (static_cast<double>(i) + 1.0 / 3 + round);
    };
    for (size_t i = 0; i < 3; ++i) {
      sums[i] = value(comm.rank(), i);
      for (int r = 0; r < comm.world_size(); ++r) want[i] += value(r, i);
    }
    comm.all_reduce_sum(sums, "test");
    ASSERT_EQ(sums, want);
  }
  queue.synchronize();
}

}  // namespace orlop::test
