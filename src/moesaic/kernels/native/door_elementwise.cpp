// Elementwise functions: see elementwise.hpp.
#include <algorithm>
#include <mutex>
#include <string>

#include "check.hpp"
#include "doors.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int64_t kTaskNumbers = 16 * 1024;  // guess: some 20 us of exponentials

template <class Call>
struct Job {
  void (*rows)(const Call&, int64_t first_row, int64_t end_row);
  const Call* call;
  int64_t size;
};

template <class Call>
void run_rows(void* context, int64_t task) {
  const Job<Call>& job = *static_cast<Job<Call>*>(context);
  job.rows(*job.call, task * job.size, std::min((task + 1) * job.size, job.call->rows));
}

template <class Call>
void run(Kernels& kernels, const Call& call, void (*rows)(const Call&, int64_t, int64_t)) {
  Job<Call> job{rows, &call, std::max<int64_t>(1, kTaskNumbers / std::max<int64_t>(1, call.columns))};
  kernels.team.run((call.rows + job.size - 1) / job.size, run_rows<Call>, &job);
}

void act(Kernels& kernels, int function, uintptr_t gate, uintptr_t up, uintptr_t y, int64_t rows, int64_t columns,
         int64_t gate_stride, int64_t up_stride, float limit, float slope, bool is_bfloat16, bool is_float32_out) {
  const Kind kind = is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32;
  const Elementwise call{{static_cast<Function>(function), limit, slope},
                         reinterpret_cast<const void*>(gate), reinterpret_cast<const void*>(up),
                         reinterpret_cast<void*>(y), rows, columns, gate_stride, up_stride, kind,
                         is_float32_out ? Kind::kFloat32 : Kind::kBfloat16};
  const std::string name = "activation [" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
  check_size(name, "rows", rows);
  check_size(name, "columns", columns);
  check_size(name, "the gate's stride", gate_stride);
  check_size(name, "the stride of up", up_stride);
  check(call.activation, up != 0, name);
  if (rows == 0 || columns == 0) return;
  if (gate == 0 || y == 0) fail(name, "a tensor has no storage");
  if (rows > 1 && (gate_stride < columns || (up != 0 && up_stride < columns)))
    fail(name, "strides of " + std::to_string(gate_stride) + " and " + std::to_string(up_stride) +
                   " must not be below the columns");
  run_act(kernels, call);
}

void softmax(Kernels& kernels, uintptr_t x, uintptr_t y, int64_t rows, int64_t columns) {
  const Softmax call{reinterpret_cast<const float*>(x), reinterpret_cast<float*>(y), rows, columns};
  const std::string name = "softmax [" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
  check_size(name, "rows", rows);
  check_size(name, "columns", columns);
  if (rows == 0 || columns == 0) return;
  if (x == 0 || y == 0) fail(name, "a tensor has no storage");
  run(kernels, call, kernels.table->softmax_rows);
}

}  // namespace

void run_act(Kernels& kernels, const Elementwise& call) { run(kernels, call, kernels.table->act_rows); }

void bind_elementwise(nb::class_<Kernels>& kernels) {
  kernels
      .def("act", act, nb::call_guard<nb::gil_scoped_release>(), nb::arg("function"), nb::arg("gate"), nb::arg("up"),
           nb::arg("y"), nb::arg("rows"), nb::arg("columns"), nb::arg("gate_stride"), nb::arg("up_stride"),
           nb::arg("limit"), nb::arg("slope"), nb::arg("is_bfloat16"), nb::arg("is_float32_out"))
      .def("softmax", softmax, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("y"), nb::arg("rows"),
           nb::arg("columns"));
}

}  // namespace moesaic
