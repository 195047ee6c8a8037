// The door between Python and the kernels: shapes and pointers come in, are checked, and go to a level.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bandwidth.hpp"
#include "linear.hpp"
#include "packed.hpp"
#include "table.hpp"
#include "team.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int64_t kTaskBytes = 64 * 1024;      // guess: weight bytes of a task; fits a second-level cache beside x
constexpr int64_t kSmallScratch = 32 * 1024;   // floats of x that one thread widens faster than two

std::vector<const LevelTable*> levels_here() {
  std::vector<const LevelTable*> found{&portable_level()};
#if defined(MOESAIC_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back(&avx2_level());
#endif
  return found;
}

int check_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024)
    throw std::invalid_argument("num_threads must be in 1 to 1024, got " + std::to_string(num_threads));
  return num_threads;
}

// Kernels of one level with threads of their own.
class Kernels {
 public:
  Kernels(const std::string& level, int num_threads) : team_(check_threads(num_threads)) {
    for (const LevelTable* table : levels_here())
      if (table->name == level) table_ = table;
    if (table_ == nullptr) throw std::invalid_argument("level " + level + " is not on this machine");
  }

  void linear(uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int64_t columns, int64_t width,
              int64_t stride, int64_t shards, bool is_bfloat16, bool is_float32_out) {
    Linear call{reinterpret_cast<const void*>(x),
                reinterpret_cast<const void*>(weight),
                reinterpret_cast<void*>(y),
                rows, columns, width, stride, shards,
                is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32,
                is_float32_out || !is_bfloat16 ? Kind::kFloat32 : Kind::kBfloat16};
    check(call);
    if (rows == 0 || columns == 0) return;
    std::lock_guard<std::mutex> turn(turn_);
    Job<Linear> job{table_, &call, scratch_of(table_->scratch_floats(call)), 0};
    if (rows * width <= kSmallScratch) {
      table_->prepare(call, job.scratch, 0, rows);
    } else {
      job.size = 8;
      team_.run((rows + job.size - 1) / job.size, prepare_rows, &job);
    }
    job.size = (task_size(columns, width * (is_bfloat16 ? 2 : 4)) + 5) / 6 * 6;  // whole tiles of every level
    team_.run((columns + job.size - 1) / job.size, run_columns, &job);
  }

  void packed_linear(uintptr_t x, uintptr_t weight, int64_t weight_bytes, uintptr_t y, int64_t rows, int64_t columns,
                     int64_t width, int64_t sections, int64_t group, int64_t bits, bool has_zeros, int64_t shards,
                     bool is_bfloat16, bool is_float32_out) {
    PackedLinear call{reinterpret_cast<const void*>(x),
                      reinterpret_cast<const uint8_t*>(weight),
                      reinterpret_cast<void*>(y),
                      rows, columns, width, sections, group, bits, has_zeros, shards,
                      is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32,
                      is_float32_out || !is_bfloat16 ? Kind::kFloat32 : Kind::kBfloat16};
    check(call, weight_bytes);
    if (rows == 0 || columns == 0) return;
    std::lock_guard<std::mutex> turn(turn_);
    Job<PackedLinear> job{table_, &call, scratch_of(table_->packed_scratch_floats(call)), 0};
    if (rows * width <= kSmallScratch) {
      table_->quantise(call, job.scratch, 0, rows);
    } else {
      job.size = 8;
      team_.run((rows + job.size - 1) / job.size, quantise_rows, &job);
    }
    job.size = task_size(call.num_panels(), call.panel_bytes());
    team_.run((call.num_panels() + job.size - 1) / job.size, run_panels, &job);
  }

 private:
  template <class Call>
  struct Job {
    const LevelTable* table;
    const Call* call;
    float* scratch;
    int64_t size;
  };

  float* scratch_of(size_t num_floats) {
    if (scratch_.size() < num_floats) scratch_.resize(num_floats);
    return scratch_.data();
  }

  // Columns or panels of a task: two tasks a thread, or less where their weights would not stay in a cache.
  int64_t task_size(int64_t count, int64_t bytes_each) const {
    const int64_t fair = (count + 2 * team_.num_threads() - 1) / (2 * team_.num_threads());
    return std::max<int64_t>(1, std::min(fair, kTaskBytes / std::max<int64_t>(bytes_each, 1)));
  }

  template <class Call>
  [[noreturn]] static void fail(const Call& call, const std::string& what) {
    throw std::invalid_argument("linear [" + std::to_string(call.rows) + ", " + std::to_string(call.width) + "] x [" +
                                std::to_string(call.columns) + ", " + std::to_string(call.width) + "]: " + what);
  }

  // Sizes whose products stay within 64 bits.
  template <class Call>
  static void check_sizes(const Call& call) {
    for (const int64_t size : {call.rows, call.columns, call.width})
      if (size < 0 || size > INT32_MAX) fail(call, "sizes must be in 0 to 2^31 - 1");
    if (call.width < 1) fail(call, "the width must be at least 1");
    if (call.rows > 0 && call.columns > 0 && (call.x == nullptr || call.weight == nullptr || call.y == nullptr))
      fail(call, "a tensor has no storage");
  }

  static void check(const Linear& call) {
    check_sizes(call);
    if (call.stride < call.width) fail(call, "a stride of " + std::to_string(call.stride) + " is below the width");
    if (call.shards < 1 || (call.shards & (call.shards - 1)) != 0 || call.width % call.shards != 0)
      fail(call, std::to_string(call.shards) + " shards must be a power of two that divides the width");
  }

  static void check(const PackedLinear& call, int64_t weight_bytes) {
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

  static void prepare_rows(void* context, int64_t task) {
    const Job<Linear>& job = *static_cast<Job<Linear>*>(context);
    const int64_t first = task * job.size;
    job.table->prepare(*job.call, job.scratch, first, std::min(first + job.size, job.call->rows));
  }

  static void run_columns(void* context, int64_t task) {
    const Job<Linear>& job = *static_cast<Job<Linear>*>(context);
    const int64_t first = task * job.size;
    job.table->run(*job.call, job.scratch, first, std::min(first + job.size, job.call->columns));
  }

  static void quantise_rows(void* context, int64_t task) {
    const Job<PackedLinear>& job = *static_cast<Job<PackedLinear>*>(context);
    const int64_t first = task * job.size;
    job.table->quantise(*job.call, job.scratch, first, std::min(first + job.size, job.call->rows));
  }

  static void run_panels(void* context, int64_t task) {
    const Job<PackedLinear>& job = *static_cast<Job<PackedLinear>*>(context);
    const int64_t first = task * job.size;
    job.table->run_packed(*job.call, job.scratch, first, std::min(first + job.size, job.call->num_panels()));
  }

  const LevelTable* table_ = nullptr;
  std::vector<float> scratch_;  // grows to the largest call
  std::mutex turn_;
  Team team_;
};

}  // namespace
}  // namespace moesaic

NB_MODULE(_native, m) {
  using moesaic::Kernels;
  using moesaic::Reader;
  // A model that is alive when the interpreter ends is no fault: the process gives everything back.
  nb::set_leak_warnings(false);
  m.doc() = "Native CPU kernels; see moesaic.kernels.native.ops.";
  m.def("levels", [] {
    std::vector<std::string> names;
    for (const moesaic::LevelTable* table : moesaic::levels_here()) names.emplace_back(table->name);
    return names;
  }, "Instruction levels that were built and that this machine has, slowest first.");
  nb::class_<Kernels>(m, "Kernels")
      .def(nb::init<const std::string&, int>(), nb::arg("level"), nb::arg("num_threads"))
      .def("linear", &Kernels::linear, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("weight"),
           nb::arg("y"), nb::arg("rows"), nb::arg("columns"), nb::arg("width"), nb::arg("stride"), nb::arg("shards"),
           nb::arg("is_bfloat16"), nb::arg("is_float32_out"))
      .def("packed_linear", &Kernels::packed_linear, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"),
           nb::arg("weight"), nb::arg("weight_bytes"), nb::arg("y"), nb::arg("rows"), nb::arg("columns"),
           nb::arg("width"), nb::arg("sections"), nb::arg("group"), nb::arg("bits"), nb::arg("has_zeros"),
           nb::arg("shards"), nb::arg("is_bfloat16"), nb::arg("is_float32_out"));
  nb::class_<Reader>(m, "Reader")
      .def("__init__", [](Reader* self, uintptr_t address, int64_t num_bytes, int num_threads) {
        new (self) Reader(address, num_bytes, moesaic::check_threads(num_threads));
      }, nb::arg("address"), nb::arg("num_bytes"), nb::arg("num_threads"))
      .def("touch", &Reader::touch, nb::call_guard<nb::gil_scoped_release>())
      .def("read", &Reader::read, nb::call_guard<nb::gil_scoped_release>())
      .def("checksum", &Reader::checksum);
}
