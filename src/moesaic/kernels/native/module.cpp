// The module that Python sees: levels, kernels of one level, and how fast memory is read.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bandwidth.hpp"
#include "doors.hpp"
#include "kernels.hpp"

namespace nb = nanobind;

namespace moesaic {

int check_threads(int num_threads) {
  if (num_threads < 1 || num_threads > 1024)
    throw std::invalid_argument("num_threads must be in 1 to 1024, got " + std::to_string(num_threads));
  return num_threads;
}

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
  nb::class_<Kernels> kernels(m, "Kernels");
  kernels.def(nb::init<const std::string&, int>(), nb::arg("level"), nb::arg("num_threads"));
  moesaic::bind_attention(kernels);
  moesaic::bind_elementwise(kernels);
  moesaic::bind_gqa(m, kernels);
  moesaic::bind_layers(kernels);
  moesaic::bind_matmul(kernels);
  moesaic::bind_router(m);
  moesaic::bind_shared(m);
  moesaic::bind_moe(m, kernels);
  moesaic::bind_wire(m);
  moesaic::bind_moe_ranks(m);
  moesaic::bind_stack(m);
  nb::class_<Reader>(m, "Reader")
      .def("__init__", [](Reader* self, uintptr_t address, int64_t num_bytes, int num_threads) {
        new (self) Reader(address, num_bytes, moesaic::check_threads(num_threads));
      }, nb::arg("address"), nb::arg("num_bytes"), nb::arg("num_threads"))
      .def("touch", &Reader::touch, nb::call_guard<nb::gil_scoped_release>())
      .def("read", &Reader::read, nb::call_guard<nb::gil_scoped_release>())
      .def("checksum", &Reader::checksum);
}
