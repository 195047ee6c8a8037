// What doors check before a level sees it. Every message has the numbers.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "elementwise.hpp"
#include "linear.hpp"

namespace moesaic {

[[noreturn]] inline void fail(const std::string& name, const std::string& what) {
  throw std::invalid_argument(name + ": " + what);
}

// Sizes of which the product of any two stays within 64 bits.
inline void check_size(const std::string& name, const char* which, int64_t size, int64_t least = 0) {
  if (size < least || size > INT32_MAX)
    fail(name, std::string(which) + " must be in " + std::to_string(least) + " to 2^31 - 1, got " +
                   std::to_string(size));
}

inline void check_packed(const Matrix& weight, const std::string& name) {
  if (weight.bits != 8 && weight.bits != 4)
    fail(name, "weights have 8 or 4 bits, not " + std::to_string(weight.bits));
  if (weight.has_zeros && weight.bits != 4) fail(name, "zero points belong to weights of 4 bits");
  if (weight.group < kBlock || weight.group % kBlock != 0 || weight.group > INT32_MAX)
    fail(name, "a group of " + std::to_string(weight.group) + " is no multiple of " + std::to_string(kBlock));
  if (weight.sections < 1 || weight.columns % weight.sections != 0)
    fail(name, std::to_string(weight.sections) + " sections do not divide the columns");
  const bool is_power = weight.shards >= 1 && (weight.shards & (weight.shards - 1)) == 0;
  if (!is_power || weight.num_blocks() % weight.shards != 0)
    fail(name, std::to_string(weight.shards) + " shards must be a power of two that divides " +
                   std::to_string(weight.num_blocks()) + " blocks of " + std::to_string(kBlock));
  const int64_t leaf = weight.num_blocks() / weight.shards * kBlock;
  if (weight.shards > 1 && weight.num_groups() > 1 && leaf % weight.group != 0)
    fail(name, "a leaf of " + std::to_string(leaf) + " is not whole groups of " + std::to_string(weight.group));
}

inline void check(const Matrix& weight, const std::string& name) {
  check_size(name, "columns", weight.columns);
  check_size(name, "the width", weight.width, 1);
  if (weight.columns > 0 && weight.data == nullptr) fail(name, "the weight has no storage");
  if (weight.is_packed()) return check_packed(weight, name);
  check_size(name, "the stride", weight.stride);
  if (weight.stride < weight.width)
    fail(name, "a stride of " + std::to_string(weight.stride) + " is below the width");
  if (weight.shards < 1 || (weight.shards & (weight.shards - 1)) != 0 || weight.width % weight.shards != 0)
    fail(name, std::to_string(weight.shards) + " shards must be a power of two that divides the width");
}

// Of a weight without gaps.
inline void check_bytes(const Matrix& weight, int64_t num_bytes, const std::string& name) {
  if (num_bytes != weight.weight_bytes())
    fail(name, "the weight has " + std::to_string(num_bytes) + " bytes, its shape needs " +
                   std::to_string(weight.weight_bytes()));
}

inline std::string name_of(const Linear& call) {
  const std::string width = std::to_string(call.weight.width);
  return "linear [" + std::to_string(call.rows) + ", " + width + "] x [" + std::to_string(call.weight.columns) + ", " +
         width + "]";
}

inline void check(const Linear& call, const std::string& name) {
  check_size(name, "rows", call.rows);
  if (call.rows > 0 && call.weight.columns > 0 && (call.x == nullptr || call.y == nullptr))
    fail(name, "a tensor has no storage");
  check(call.weight, name);
}

inline void check(const Activation& activation, bool has_up, const std::string& name) {
  const int function = static_cast<int>(activation.function);
  if (function < 0 || function >= static_cast<int>(Function::kEnd))
    fail(name, "there is no function " + std::to_string(function));
  if (activation.function == Function::kSwigluClamped && !has_up)
    fail(name, "the clamped activation has a gate and an up");
}

}  // namespace moesaic
