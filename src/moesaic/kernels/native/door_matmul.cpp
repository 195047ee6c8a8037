// Matmuls: see linear.hpp and packed.hpp.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

#include "doors.hpp"
#include "linear.hpp"
#include "packed.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

template <class Call>
struct Job {
  const LevelTable* table;
  const Call* call;
  float* scratch;
  int64_t size;
};

template <class Call>
[[noreturn]] void fail(const Call& call, const std::string& what) {
  throw std::invalid_argument("linear [" + std::to_string(call.rows) + ", " + std::to_string(call.width) + "] x [" +
                              std::to_string(call.columns) + ", " + std::to_string(call.width) + "]: " + what);
}

// Sizes whose products stay within 64 bits.
template <class Call>
void check_sizes(const Call& call) {
  for (const int64_t size : {call.rows, call.columns, call.width})
    if (size < 0 || size > INT32_MAX) fail(call, "sizes must be in 0 to 2^31 - 1");
  if (call.width < 1) fail(call, "the width must be at least 1");
  if (call.rows > 0 && call.columns > 0 && (call.x == nullptr || call.weight == nullptr || call.y == nullptr))
    fail(call, "a tensor has no storage");
}

void check(const Linear& call) {
  check_sizes(call);
  if (call.stride < call.width) fail(call, "a stride of " + std::to_string(call.stride) + " is below the width");
  if (call.shards < 1 || (call.shards & (call.shards - 1)) != 0 || call.width % call.shards != 0)
    fail(call, std::to_string(call.shards) + " shards must be a power of two that divides the width");
}

void check(const PackedLinear& call, int64_t weight_bytes) {
  check_sizes(call);
  if (call.bits != 8 && call.bits != 4) fail(call, "weights have 8 or 4 bits, not " + std::to_string(call.bits));
  if (call.has_zeros && call.bits != 4) fail(call, "zero points belong to weights of 4 bits");
  if (call.group < kBlock || call.group % kBlock != 0 || call.group > INT32_MAX)
    fail(call, "a group of " + std::to_string(call.group) + " is no multiple of " + std::to_string(kBlock));
  if (call.sections < 1 || call.columns % call.sections != 0)
    fail(call, std::to_string(call.sections) + " sections do not divide the columns");
  const bool is_power = call.shards >= 1 && (call.shards & (call.shards - 1)) == 0;
  if (!is_power || call.num_blocks() % call.shards != 0)
    fail(call, std::to_string(call.shards) + " shards must be a power of two that divides " +
                   std::to_string(call.num_blocks()) + " blocks of " + std::to_string(kBlock));
  const int64_t leaf = call.num_blocks() / call.shards * kBlock;
  if (call.shards > 1 && call.num_groups() > 1 && leaf % call.group != 0)
    fail(call, "a leaf of " + std::to_string(leaf) + " is not whole groups of " + std::to_string(call.group));
  const int64_t expected = call.num_panels() * call.panel_bytes();
  if (weight_bytes != expected)
    fail(call, "the weight has " + std::to_string(weight_bytes) + " bytes, its shape needs " +
                   std::to_string(expected));
}

void prepare_rows(void* context, int64_t task) {
  const Job<Linear>& job = *static_cast<Job<Linear>*>(context);
  const int64_t first = task * job.size;
  job.table->prepare(*job.call, job.scratch, first, std::min(first + job.size, job.call->rows));
}

void run_columns(void* context, int64_t task) {
  const Job<Linear>& job = *static_cast<Job<Linear>*>(context);
  const int64_t first = task * job.size;
  job.table->run(*job.call, job.scratch, first, std::min(first + job.size, job.call->columns));
}

void quantise_rows(void* context, int64_t task) {
  const Job<PackedLinear>& job = *static_cast<Job<PackedLinear>*>(context);
  const int64_t first = task * job.size;
  job.table->quantise(*job.call, job.scratch, first, std::min(first + job.size, job.call->rows));
}

void run_panels(void* context, int64_t task) {
  const Job<PackedLinear>& job = *static_cast<Job<PackedLinear>*>(context);
  const int64_t first = task * job.size;
  job.table->run_packed(*job.call, job.scratch, first, std::min(first + job.size, job.call->num_panels()));
}

void linear(Kernels& kernels, uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int64_t columns, int64_t width,
            int64_t stride, int64_t shards, bool is_bfloat16, bool is_float32_out) {
  Linear call{reinterpret_cast<const void*>(x),
              reinterpret_cast<const void*>(weight),
              reinterpret_cast<void*>(y),
              rows, columns, width, stride, shards,
              is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32,
              is_float32_out || !is_bfloat16 ? Kind::kFloat32 : Kind::kBfloat16};
  check(call);
  if (rows == 0 || columns == 0) return;
  std::lock_guard<std::mutex> turn(kernels.turn);
  Job<Linear> job{kernels.table, &call, kernels.scratch_of(kernels.table->scratch_floats(call)), 0};
  if (rows * width <= kSmallScratch) {
    kernels.table->prepare(call, job.scratch, 0, rows);
  } else {
    job.size = 8;
    kernels.team.run((rows + job.size - 1) / job.size, prepare_rows, &job);
  }
  job.size = (kernels.task_size(columns, width * (is_bfloat16 ? 2 : 4)) + 5) / 6 * 6;  // whole tiles of every level
  kernels.team.run((columns + job.size - 1) / job.size, run_columns, &job);
}

void packed_linear(Kernels& kernels, uintptr_t x, uintptr_t weight, int64_t weight_bytes, uintptr_t y, int64_t rows,
                   int64_t columns, int64_t width, int64_t sections, int64_t group, int64_t bits, bool has_zeros,
                   int64_t shards, bool is_bfloat16, bool is_float32_out) {
  PackedLinear call{reinterpret_cast<const void*>(x),
                    reinterpret_cast<const uint8_t*>(weight),
                    reinterpret_cast<void*>(y),
                    rows, columns, width, sections, group, bits, has_zeros, shards,
                    is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32,
                    is_float32_out || !is_bfloat16 ? Kind::kFloat32 : Kind::kBfloat16};
  check(call, weight_bytes);
  if (rows == 0 || columns == 0) return;
  std::lock_guard<std::mutex> turn(kernels.turn);
  Job<PackedLinear> job{kernels.table, &call, kernels.scratch_of(kernels.table->packed_scratch_floats(call)), 0};
  if (rows * width <= kSmallScratch) {
    kernels.table->quantise(call, job.scratch, 0, rows);
  } else {
    job.size = 8;
    kernels.team.run((rows + job.size - 1) / job.size, quantise_rows, &job);
  }
  job.size = kernels.task_size(call.num_panels(), call.panel_bytes());
  kernels.team.run((call.num_panels() + job.size - 1) / job.size, run_panels, &job);
}

}  // namespace

void bind_matmul(nb::class_<Kernels>& kernels) {
  kernels
      .def("linear", linear, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("weight"),
           nb::arg("y"), nb::arg("rows"), nb::arg("columns"), nb::arg("width"), nb::arg("stride"), nb::arg("shards"),
           nb::arg("is_bfloat16"), nb::arg("is_float32_out"))
      .def("packed_linear", packed_linear, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"),
           nb::arg("weight"), nb::arg("weight_bytes"), nb::arg("y"), nb::arg("rows"), nb::arg("columns"),
           nb::arg("width"), nb::arg("sections"), nb::arg("group"), nb::arg("bits"), nb::arg("has_zeros"),
           nb::arg("shards"), nb::arg("is_bfloat16"), nb::arg("is_float32_out"));
}

}  // namespace moesaic
