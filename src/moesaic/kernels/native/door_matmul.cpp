// Matmuls: see linear.hpp and packed.hpp.
#include <algorithm>
#include <mutex>

#include "check.hpp"
#include "doors.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

struct Job {
  const LevelTable* table;
  const Linear* call;
  uint8_t* scratch;
  int64_t size;
};

void prepare_rows(void* context, int64_t task) {
  const Job& job = *static_cast<Job*>(context);
  const int64_t first = task * job.size;
  job.table->prepare(*job.call, job.scratch, first, std::min(first + job.size, job.call->rows));
}

void run_strips(void* context, int64_t task) {
  const Job& job = *static_cast<Job*>(context);
  const int64_t first = task * job.size;
  job.table->run(*job.call, job.scratch, first, std::min(first + job.size, job.call->weight.num_strips()));
}

void run(Kernels& kernels, const Linear& call) {
  const Matrix& weight = call.weight;
  if (call.rows == 0 || weight.columns == 0) return;
  std::lock_guard<std::mutex> turn(kernels.turn);
  const size_t num_floats = call.rows * kernels.table->row_bytes(weight) / sizeof(float);
  Job job{kernels.table, &call, reinterpret_cast<uint8_t*>(kernels.scratch_of(num_floats)), 0};
  if (call.rows * weight.width <= kSmallScratch) {
    kernels.table->prepare(call, job.scratch, 0, call.rows);
  } else {
    job.size = 8;
    kernels.team.run((call.rows + job.size - 1) / job.size, prepare_rows, &job);
  }
  job.size = kernels.task_size(weight.num_strips(), weight.strip_bytes());
  if (!weight.is_packed()) job.size = (job.size + 11) / 12 * 12;  // whole tiles of every level
  kernels.team.run((weight.num_strips() + job.size - 1) / job.size, run_strips, &job);
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
  run(kernels, call);
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
  run(kernels, call);
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
