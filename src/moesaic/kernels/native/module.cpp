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
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2_level());
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
    const size_t needed = table_->scratch_floats(call);
    if (scratch_.size() < needed) scratch_.resize(needed);
    Job job{table_, &call, scratch_.data(), 0};
    if (static_cast<int64_t>(needed) <= kSmallScratch) {
      table_->prepare(call, scratch_.data(), 0, rows);
    } else {
      job.size = 8;
      team_.run((rows + job.size - 1) / job.size, prepare_rows, &job);
    }
    const int64_t row_bytes = width * (is_bfloat16 ? 2 : 4);
    const int64_t fair = (columns + 2 * team_.num_threads() - 1) / (2 * team_.num_threads());
    job.size = std::max<int64_t>(1, std::min(fair, kTaskBytes / std::max<int64_t>(row_bytes, 1)));
    job.size = (job.size + 5) / 6 * 6;  // whole tiles of every level
    team_.run((columns + job.size - 1) / job.size, run_columns, &job);
  }

 private:
  struct Job {
    const LevelTable* table;
    const Linear* call;
    float* scratch;
    int64_t size;
  };

  static void check(const Linear& call) {
    const auto fail = [&](const std::string& what) {
      throw std::invalid_argument("linear [" + std::to_string(call.rows) + ", " + std::to_string(call.width) + "] x [" +
                                  std::to_string(call.columns) + ", " + std::to_string(call.width) + "]: " + what);
    };
    if (call.rows < 0 || call.columns < 0 || call.width < 1) fail("sizes must not be negative, the width at least 1");
    if (call.stride < call.width) fail("a stride of " + std::to_string(call.stride) + " is below the width");
    if (call.shards < 1 || (call.shards & (call.shards - 1)) != 0 || call.width % call.shards != 0)
      fail(std::to_string(call.shards) + " shards must be a power of two that divides the width");
    if (call.rows > 0 && call.columns > 0 && (call.x == nullptr || call.weight == nullptr || call.y == nullptr))
      fail("a tensor has no storage");
  }

  static void prepare_rows(void* context, int64_t task) {
    const Job& job = *static_cast<Job*>(context);
    const int64_t first = task * job.size;
    job.table->prepare(*job.call, job.scratch, first, std::min(first + job.size, job.call->rows));
  }

  static void run_columns(void* context, int64_t task) {
    const Job& job = *static_cast<Job*>(context);
    const int64_t first = task * job.size;
    job.table->run(*job.call, job.scratch, first, std::min(first + job.size, job.call->columns));
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
           nb::arg("is_bfloat16"), nb::arg("is_float32_out"));
  nb::class_<Reader>(m, "Reader")
      .def("__init__", [](Reader* self, uintptr_t address, int64_t num_bytes, int num_threads) {
        new (self) Reader(address, num_bytes, moesaic::check_threads(num_threads));
      }, nb::arg("address"), nb::arg("num_bytes"), nb::arg("num_threads"))
      .def("touch", &Reader::touch, nb::call_guard<nb::gil_scoped_release>())
      .def("read", &Reader::read, nb::call_guard<nb::gil_scoped_release>())
      .def("checksum", &Reader::checksum);
}
