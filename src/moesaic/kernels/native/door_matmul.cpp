// Matmuls: see linear.hpp and packed.hpp.
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "doors.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int kMostAtOnce = 4;

// Matmuls of one x: those of packed weights of as many bits, and those of floats of one kind and as many leaves,
// share its form.
struct Job {
  const LevelTable* table;
  const Linear* calls;
  uint8_t* scratch[kMostAtOnce];
  Cut cuts[kMostAtOnce];
  int64_t first_task[kMostAtOnce + 1];
  int of;  // whose rows are prepared
};

constexpr int64_t kRowsOfTask = 4;

void prepare_rows(void* context, int64_t task) {
  const Job& job = *static_cast<Job*>(context);
  const int64_t first = task * kRowsOfTask;
  job.table->prepare(job.calls[job.of], job.scratch[job.of], first,
                     std::min(first + kRowsOfTask, job.calls[job.of].rows));
}

void run_strips(void* context, int64_t task) {
  const Job& job = *static_cast<Job*>(context);
  int i = 0;
  while (task >= job.first_task[i + 1]) ++i;
  const int64_t within = task - job.first_task[i];
  job.table->run(job.calls[i], job.scratch[i], job.cuts[i].first(within), job.cuts[i].first(within + 1));
}

// Strips of a weight in tasks, four a thread at least.
Cut cut(const Matrix& weight, int64_t rows, bool is_last, int num_threads) {
  const int64_t count = weight.num_strips(), tile = weight.is_packed() ? 1 : 24;  // whole tiles of every level
  const auto strips = [&](int64_t num_bytes) {
    const int64_t most = std::max<int64_t>(1, num_bytes / std::max<int64_t>(weight.strip_bytes(), 1));
    return (std::min(most, (count + 4 * num_threads - 1) / (4 * num_threads)) + tile - 1) / tile * tile;
  };
  const int64_t size = std::max<int64_t>(1, strips(task_bytes(rows, weight.weight_bytes(), num_threads)));
  if (!is_last) return {count, size};
  return {count, size, std::max<int64_t>(1, strips(kLastTaskBytes)), num_threads};
}

bool has_form_of(const Matrix& a, const Matrix& b) {
  return a.bits == b.bits && (a.is_packed() || (a.kind == b.kind && a.shards == b.shards));
}

Kind kind_of(bool is_bfloat16) { return is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32; }

void linear(Kernels& kernels, uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int64_t columns, int64_t width,
            int64_t stride, int64_t shards, bool is_bfloat16, bool is_float32_out) {
  const Kind kind = kind_of(is_bfloat16);
  const Matrix matrix =
      Matrix::of_floats(reinterpret_cast<const void*>(weight), columns, width, shards, kind, stride);
  const Linear call{matrix, reinterpret_cast<const void*>(x), reinterpret_cast<void*>(y), rows, kind,
                    is_float32_out ? Kind::kFloat32 : kind};
  check(call, name_of(call));
  run_linears(kernels, &call, 1);
}

void packed_linear(Kernels& kernels, uintptr_t x, uintptr_t weight, int64_t weight_bytes, uintptr_t y, int64_t rows,
                   int64_t columns, int64_t width, int64_t sections, int64_t group, int64_t bits, bool has_zeros,
                   int64_t shards, bool is_bfloat16, bool is_float32_out) {
  const Kind kind = kind_of(is_bfloat16);
  const Matrix matrix = Matrix::of_panels(reinterpret_cast<const void*>(weight), columns, width, shards, bits, group,
                                          sections, has_zeros);
  const Linear call{matrix, reinterpret_cast<const void*>(x), reinterpret_cast<void*>(y), rows, kind,
                    is_float32_out ? Kind::kFloat32 : kind};
  const std::string name = name_of(call);
  if (bits == 0) fail(name, "packed weights have 8 or 4 bits, not 0");
  check(call, name);
  check_bytes(matrix, weight_bytes, name);
  run_linears(kernels, &call, 1);
}

}  // namespace

void run_linears(Kernels& kernels, const Linear* calls, int count) {
  if (count > kMostAtOnce) throw std::invalid_argument("matmuls: more than " + std::to_string(kMostAtOnce) + " at once");
  const int64_t rows = calls[0].rows, width = calls[0].weight.width;
  if (rows == 0) return;
  std::lock_guard<std::mutex> turn(kernels.turn);
  Job job{kernels.table, calls, {}, {}, {}, 0};
  size_t begin[kMostAtOnce], num_bytes = 0;
  int form[kMostAtOnce];  // the first whose form a matmul shares
  for (int i = 0; i < count; ++i) {
    for (form[i] = 0; !has_form_of(calls[form[i]].weight, calls[i].weight);) ++form[i];
    if (form[i] < i) continue;
    begin[i] = num_bytes;
    num_bytes += rows * kernels.table->row_bytes(calls[i].weight);
  }
  uint8_t* scratch = reinterpret_cast<uint8_t*>(kernels.scratch_of(num_bytes / sizeof(float)));
  for (int i = 0; i < count; ++i) {
    job.scratch[i] = scratch + begin[form[i]];
    if (form[i] < i) continue;
    job.of = i;
    if (rows * width <= kSmallScratch)
      kernels.table->prepare(calls[i], job.scratch[i], 0, rows);
    else
      kernels.team.run((rows + kRowsOfTask - 1) / kRowsOfTask, prepare_rows, &job);
  }
  for (int i = 0; i < count; ++i) {
    job.cuts[i] = cut(calls[i].weight, rows, i + 1 == count, kernels.team.num_threads());
    job.first_task[i + 1] = job.first_task[i] + job.cuts[i].num_tasks();
  }
  kernels.team.run(job.first_task[count], run_strips, &job);
}

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
