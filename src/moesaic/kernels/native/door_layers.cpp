// What stands between the matmuls: norms and rotations (norm.hpp), gates (gate.hpp), recurrent states (state.hpp).
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "doors.hpp"
#include "gate.hpp"
#include "norm.hpp"
#include "state.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int64_t kSmallNumbers = 32 * 1024;  // guess: that one thread has done before another wakes
constexpr int64_t kChannels = 512;            // of a task

template <class Call>
struct Job {
  const LevelTable* table;
  const Call* call;
  int64_t size;
};

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument(what); }

std::string text(int64_t number) { return std::to_string(number); }

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    fail(std::string(name) + " must be in " + text(least) + " to " + text(most) + ", got " + text(value));
}

void check_there(const char* name, bool is_there) {
  if (!is_there) fail(std::string(name) + ": a tensor has no storage");
}

float* floats_of_thread(size_t count) {
  thread_local std::vector<float> floats;
  if (floats.size() < count) floats.resize(count);
  return floats.data();
}

Kind kind_of(bool is_bfloat16) { return is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32; }

// `count` things in tasks of `size` each; few numbers at once.
template <class Call>
void share(Kernels& kernels, const Call& call, int64_t count, int64_t numbers, int64_t size, Team::Task task) {
  Job<Call> job{kernels.table, &call, size};
  const int64_t num_tasks = (count + size - 1) / size;
  if (numbers < kSmallNumbers) {
    for (int64_t i = 0; i < num_tasks; ++i) task(&job, i);
    return;
  }
  std::lock_guard<std::mutex> turn(kernels.turn);
  kernels.team.run(num_tasks, task, &job);
}

void norm_task(void* context, int64_t task) {
  const Job<Norm>& job = *static_cast<Job<Norm>*>(context);
  job.table->norm_rows(*job.call, task * job.size, std::min((task + 1) * job.size, job.call->rows),
                       floats_of_thread(static_cast<size_t>(job.call->width + 16)));
}

void norm(Kernels& kernels, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t y, int64_t rows, int64_t width,
          float eps, int64_t kind, bool is_bfloat16, bool is_weight_bfloat16, bool is_bfloat16_out) {
  check_range("norm: rows", rows, 0, INT32_MAX);
  check_range("norm: the width", width, 1, 1 << 24);
  check_range("norm: the kind", kind, 0, 2);
  if (rows == 0) return;
  check_there("norm", x != 0 && y != 0);
  const Norm call{reinterpret_cast<const void*>(x),
                  reinterpret_cast<const void*>(weight),
                  reinterpret_cast<const void*>(bias),
                  reinterpret_cast<void*>(y),
                  rows, width, eps, static_cast<NormKind>(kind),
                  kind_of(is_bfloat16), kind_of(is_weight_bfloat16), kind_of(is_bfloat16_out)};
  run_norm(kernels, call);
}

void rotate_task(void* context, int64_t task) {
  const Job<Rotation>& job = *static_cast<Job<Rotation>*>(context);
  job.table->rotate(*job.call, task * job.size, std::min((task + 1) * job.size, job.call->tokens));
}

void rotate(Kernels& kernels, uintptr_t x, uintptr_t cosines, uintptr_t sines, uintptr_t y, int64_t tokens,
            int64_t heads, int64_t width, int64_t half, int64_t token_stride, int64_t head_stride, bool is_interleaved,
            bool is_bfloat16) {
  check_range("rotation: tokens", tokens, 0, INT32_MAX);
  check_range("rotation: heads", heads, 0, 1 << 16);
  check_range("rotation: the width", width, 1, 1 << 14);
  check_range("rotation: half of the turned columns", half, 0, width / 2);
  check_range("rotation: a token's stride", token_stride, 0, INT32_MAX);
  check_range("rotation: a head's stride", head_stride, 0, INT32_MAX);
  if (tokens == 0 || heads == 0) return;
  check_there("rotation", x != 0 && y != 0 && (half == 0 || (cosines != 0 && sines != 0)));
  const Rotation call{reinterpret_cast<const void*>(x),
                      reinterpret_cast<const float*>(cosines),
                      reinterpret_cast<const float*>(sines),
                      reinterpret_cast<void*>(y),
                      tokens, heads, width, half, token_stride, head_stride, is_interleaved, kind_of(is_bfloat16)};
  run_rotation(kernels, call);
}

void gate_task(void* context, int64_t task) {
  const Job<Gate>& job = *static_cast<Job<Gate>*>(context);
  const Gate& call = *job.call;
  const size_t scratch = job.table->gate_scratch_floats(call), ids = static_cast<size_t>(2 * call.groups + 2);
  float* floats = floats_of_thread(scratch + ids);
  int64_t* group_ids = reinterpret_cast<int64_t*>(floats + (scratch + 1) / 2 * 2);
  job.table->gate_rows(call, task * job.size, std::min((task + 1) * job.size, call.rows), floats, group_ids);
}

void gate(Kernels& kernels, uintptr_t logits, uintptr_t selection_bias, uintptr_t expert_scale, uintptr_t ids,
          uintptr_t weights, int64_t rows, int64_t experts, int64_t chosen, int64_t groups, int64_t groups_kept,
          bool is_sigmoid, bool is_topk_first, bool is_top2_sum, bool is_renormalised, float epsilon, float floor,
          float scale) {
  const Gate call{reinterpret_cast<const float*>(logits),
                  reinterpret_cast<const float*>(selection_bias),
                  reinterpret_cast<const float*>(expert_scale),
                  reinterpret_cast<int64_t*>(ids),
                  reinterpret_cast<float*>(weights),
                  rows, experts, chosen, groups, groups_kept, is_sigmoid, is_topk_first, is_top2_sum, is_renormalised,
                  epsilon, floor, scale};
  check_gate(call);
  if (rows == 0) return;
  check_there("gate", logits != 0 && ids != 0 && weights != 0);
  run_gate(kernels, call);
}

// Sequences that follow each other in the batch, each with slots of its own to write.
const StateRow* check_rows(const char* name, uintptr_t rows, int64_t num_rows, int64_t num_tokens, int64_t num_slots) {
  check_range(name, num_tokens, 0, INT32_MAX);
  check_range(name, num_rows, 0, num_tokens);
  const StateRow* all = reinterpret_cast<const StateRow*>(rows);
  if (num_rows > 0) check_there(name, all != nullptr);
  int64_t next = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (all[i].first_token != next || all[i].num_tokens < 1 || all[i].num_tokens > num_tokens - next)
      fail(std::string(name) + ": a sequence of tokens " + text(all[i].first_token) + " + " + text(all[i].num_tokens) +
           " does not follow token " + text(next) + " of " + text(num_tokens));
    check_range((std::string(name) + ": a slot").c_str(), all[i].slot_from, -1, num_slots - 1);
    check_range((std::string(name) + ": a slot").c_str(), all[i].slot_to, 0, num_slots - 1);
    if (all[i].slot_from == all[i].slot_to)
      fail(std::string(name) + ": slot " + text(all[i].slot_to) + " is read and written by one sequence");
    next += all[i].num_tokens;
  }
  if (next != num_tokens)
    fail(std::string(name) + ": " + text(num_tokens) + " tokens, sequences of " + text(next) + " in all");
  return all;
}

void conv_task(void* context, int64_t task) {
  const Job<Conv>& job = *static_cast<Job<Conv>*>(context);
  job.table->convolve(*job.call, task * job.size, std::min((task + 1) * job.size, job.call->channels));
}

void causal_conv(Kernels& kernels, uintptr_t x, uintptr_t weight, uintptr_t tails, uintptr_t y, uintptr_t rows,
                 int64_t num_rows, int64_t num_tokens, int64_t num_slots, int64_t channels, int64_t taps,
                 bool is_bfloat16, bool is_weight_bfloat16, bool is_tail_bfloat16, bool is_bfloat16_out) {
  check_range("convolution: channels", channels, 1, 1 << 24);
  check_range("convolution: taps", taps, 1, 64);
  check_range("convolution: slots", num_slots, 0, INT32_MAX);
  const StateRow* all = check_rows("convolution", rows, num_rows, num_tokens, num_slots);
  if (num_tokens == 0) return;
  check_there("convolution", x != 0 && weight != 0 && y != 0 && (taps == 1 || tails != 0));
  const Conv call{reinterpret_cast<const void*>(x),
                  reinterpret_cast<const void*>(weight),
                  reinterpret_cast<void*>(tails),
                  reinterpret_cast<void*>(y),
                  all, num_rows, channels, taps, kind_of(is_bfloat16), kind_of(is_weight_bfloat16),
                  kind_of(is_tail_bfloat16), kind_of(is_bfloat16_out)};
  share(kernels, call, channels, num_tokens * channels * taps, kChannels, conv_task);
}

void delta_task(void* context, int64_t task) {
  const Job<Delta>& job = *static_cast<Job<Delta>*>(context);
  job.table->delta_head(*job.call, task / job.call->heads, task % job.call->heads,
                        floats_of_thread(static_cast<size_t>(job.call->value_width)));
}

void delta_rule(Kernels& kernels, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t log_decay, uintptr_t beta,
                uintptr_t states, uintptr_t y, uintptr_t rows, int64_t num_rows, int64_t num_tokens, int64_t num_slots,
                int64_t heads, int64_t groups, int64_t key_width, int64_t value_width, bool is_bfloat16_out) {
  check_range("delta rule: heads", heads, 1, 1 << 16);
  check_range("delta rule: key heads", groups, 1, heads);
  check_range("delta rule: the key width", key_width, 1, 1 << 14);
  check_range("delta rule: the value width", value_width, 1, 1 << 14);
  check_range("delta rule: slots", num_slots, 0, INT32_MAX);
  if (heads % groups != 0) fail("delta rule: " + text(groups) + " key heads do not divide " + text(heads));
  const StateRow* all = check_rows("delta rule", rows, num_rows, num_tokens, num_slots);
  if (num_tokens == 0) return;
  check_there("delta rule", q != 0 && k != 0 && v != 0 && log_decay != 0 && beta != 0 && states != 0 && y != 0);
  const Delta call{reinterpret_cast<const float*>(q),
                   reinterpret_cast<const float*>(k),
                   reinterpret_cast<const float*>(v),
                   reinterpret_cast<const float*>(log_decay),
                   reinterpret_cast<const float*>(beta),
                   reinterpret_cast<float*>(states),
                   reinterpret_cast<void*>(y),
                   all, num_rows, heads, groups, key_width, value_width, kind_of(is_bfloat16_out)};
  share(kernels, call, num_rows * heads, num_tokens * heads * key_width * value_width, 1, delta_task);
}

}  // namespace

void run_norm(Kernels& kernels, const Norm& call) {
  share(kernels, call, call.rows, call.rows * call.width, std::max<int64_t>(1, 8192 / call.width), norm_task);
}

void run_rotation(Kernels& kernels, const Rotation& call) {
  const int64_t numbers = call.heads * call.width;
  share(kernels, call, call.tokens, call.tokens * numbers, std::max<int64_t>(1, 8192 / numbers), rotate_task);
}

void check_gate(const Gate& call) {
  check_range("gate: rows", call.rows, 0, INT32_MAX);
  check_range("gate: experts", call.experts, 1, 1 << 20);
  check_range("gate: chosen experts", call.chosen, 1, call.experts);
  check_range("gate: groups", call.groups, 1, call.experts);
  check_range("gate: groups of a row", call.groups_kept, 1, call.groups);
  const int64_t of_group = call.experts / call.groups;
  if (call.experts % call.groups != 0)
    fail("gate: " + text(call.groups) + " groups do not divide " + text(call.experts) + " experts");
  if (call.groups_kept * of_group < call.chosen)
    fail("gate: " + text(call.groups_kept) + " groups of " + text(of_group) + " leave fewer than " +
         text(call.chosen) + " experts");
}

void run_gate(Kernels& kernels, const Gate& call) {
  share(kernels, call, call.rows, call.rows * call.experts, std::max<int64_t>(1, 4096 / call.experts), gate_task);
}

void bind_layers(nb::class_<Kernels>& kernels) {
  kernels
      .def("norm", norm, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
           nb::arg("y"), nb::arg("rows"), nb::arg("width"), nb::arg("eps"), nb::arg("kind"), nb::arg("is_bfloat16"),
           nb::arg("is_weight_bfloat16"), nb::arg("is_bfloat16_out"))
      .def("rotate", rotate, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("cosines"),
           nb::arg("sines"), nb::arg("y"), nb::arg("tokens"), nb::arg("heads"), nb::arg("width"), nb::arg("half"),
           nb::arg("token_stride"), nb::arg("head_stride"), nb::arg("is_interleaved"), nb::arg("is_bfloat16"))
      .def("gate", gate, nb::call_guard<nb::gil_scoped_release>(), nb::arg("logits"), nb::arg("selection_bias"),
           nb::arg("expert_scale"), nb::arg("ids"), nb::arg("weights"), nb::arg("rows"), nb::arg("experts"),
           nb::arg("chosen"), nb::arg("groups"), nb::arg("groups_kept"), nb::arg("is_sigmoid"),
           nb::arg("is_topk_first"), nb::arg("is_top2_sum"), nb::arg("is_renormalised"), nb::arg("epsilon"),
           nb::arg("floor"), nb::arg("scale"))
      .def("causal_conv", causal_conv, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("weight"),
           nb::arg("tails"), nb::arg("y"), nb::arg("rows"), nb::arg("num_rows"), nb::arg("num_tokens"),
           nb::arg("num_slots"), nb::arg("channels"), nb::arg("taps"), nb::arg("is_bfloat16"),
           nb::arg("is_weight_bfloat16"), nb::arg("is_tail_bfloat16"), nb::arg("is_bfloat16_out"))
      .def("delta_rule", delta_rule, nb::call_guard<nb::gil_scoped_release>(), nb::arg("q"), nb::arg("k"),
           nb::arg("v"), nb::arg("log_decay"), nb::arg("beta"), nb::arg("states"), nb::arg("y"), nb::arg("rows"),
           nb::arg("num_rows"), nb::arg("num_tokens"), nb::arg("num_slots"), nb::arg("heads"), nb::arg("groups"),
           nb::arg("key_width"), nb::arg("value_width"), nb::arg("is_bfloat16_out"));
}

}  // namespace moesaic
