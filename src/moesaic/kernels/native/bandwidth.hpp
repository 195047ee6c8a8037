// How fast memory is read: all bytes of a buffer, by the threads of a team, each byte once a pass. The caller owns
// the buffer and decides what pages it has.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "team.hpp"

namespace moesaic {

class Reader {
 public:
  Reader(uintptr_t address, int64_t num_bytes, int num_threads)
      : begin_(reinterpret_cast<unsigned char*>(address)), num_bytes_(num_bytes), team_(num_threads) {
    if (address == 0 || num_bytes < kTaskBytes || num_bytes % kTaskBytes != 0)
      throw std::invalid_argument("a buffer to read must be whole tasks of " + std::to_string(kTaskBytes) +
                                  " bytes, got " + std::to_string(num_bytes));
  }

  // Writes every page once, by the same threads: on several sockets the pages then lie on all of them.
  void touch() { team_.run(num_bytes_ / kTaskBytes, touch_task, this); }

  // Seconds of one pass.
  double read() {
    const auto start = std::chrono::steady_clock::now();
    team_.run(num_bytes_ / kTaskBytes, read_task, this);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  // Of all words of all passes, by exclusive or: who knows the content can tell that they were read.
  uint64_t checksum() const { return checksum_.load(); }

 private:
  static constexpr int64_t kTaskBytes = 1024 * 1024;
  static constexpr int kWords = 16;  // two cache lines of independent sums: the loop waits for memory alone

  static void touch_task(void* context, int64_t task) {
    const Reader& reader = *static_cast<Reader*>(context);
    std::memset(reader.begin_ + task * kTaskBytes, static_cast<int>(task * 37 + 1) & 0xff, kTaskBytes);
  }

  static void read_task(void* context, int64_t task) {
    Reader& reader = *static_cast<Reader*>(context);
    const unsigned char* at = reader.begin_ + task * kTaskBytes;
    uint64_t sums[kWords] = {};
    for (int64_t offset = 0; offset < kTaskBytes; offset += sizeof sums) {
      uint64_t words[kWords];
      std::memcpy(words, at + offset, sizeof words);
      for (int i = 0; i < kWords; ++i) sums[i] ^= words[i] + static_cast<uint64_t>(offset);
    }
    uint64_t sum = 0;
    for (int i = 0; i < kWords; ++i) sum ^= sums[i] * (2 * i + 1);
    reader.checksum_.fetch_xor(sum);
  }

  unsigned char* begin_;
  int64_t num_bytes_;
  std::atomic<uint64_t> checksum_{0};
  Team team_;
};

}  // namespace moesaic
