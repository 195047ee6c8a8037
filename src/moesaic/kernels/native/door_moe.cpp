// The routed experts of a layer in one call: see moe.hpp. One run of the team does all stages: a task waits for those
// that it reads, all of which were taken before it, so that nobody waits for a whole stage but the combine.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "doors.hpp"
#include "moe_layer.hpp"

namespace nb = nanobind;

namespace moesaic {

constexpr int64_t kRowUnit = 8;  // rows of x that one task prepares

struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Stage : int32_t { kRows, kInner, kDown, kCombine };

struct Task {
  Stage stage;
  int32_t slot;
  int64_t first, end;
};

// One call and the memory of all calls.
struct MoeRun {
  Moe call{};
  const LevelTable* table = nullptr;
  int num_threads = 1;
  std::vector<Task> tasks;
  std::vector<int32_t> offsets, choice_of_job, job_of_choice, active, by_rows, place;
  Buffer rows[kForms], hidden, out;
  Buffer normed, logits, shared;  // of a call that begins with norm and router
  std::mutex half;                // held by that call
  Added added{};
  std::vector<std::atomic<int32_t>> inner_left;  // by slot; it only grows by being replaced
  std::atomic<int64_t> rows_left{0}, down_left{0};
  std::atomic<bool> is_late{false};
  Clock::time_point deadline;
  int64_t num_launches = 0, num_jobs = 0, weight_bytes = 0;  // of all calls

  template <class Number>
  bool wait_for(const std::atomic<Number>& left) {
    Patience patience;
    while (left.load() > 0) {
      if (patience.wait(deadline)) continue;
      is_late.store(true);
      return false;
    }
    return true;
  }

  const char* stage() const {
    if (rows_left.load() > 0) return "rows";
    for (const int32_t slot : active)
      if (inner_left[slot].load() > 0) return "inner";
    return down_left.load() > 0 ? "down" : "combine";
  }
};

Kernels::Memory::Memory(int num_threads) : team(num_threads), moe(new MoeRun) {}
Kernels::Memory::~Memory() = default;

namespace {

// Where the weights begin of the task that a thread is likely to take after task `at`: others take those between.
const uint8_t* weights_after(const MoeRun& run, int64_t at) {
  at += run.num_threads;
  if (at >= static_cast<int64_t>(run.tasks.size())) return nullptr;
  const Task& task = run.tasks[at];
  const Expert& expert = run.call.slots[task.slot];
  if (task.stage == Stage::kInner) return expert.inner.strip(0, task.first);
  return task.stage == Stage::kDown ? expert.down.strip(0, task.first) : nullptr;
}

void run_task(void* context, int64_t at) {
  MoeRun& run = *static_cast<MoeRun*>(context);
  const Task& task = run.tasks[at];
  if (run.is_late.load()) return;
  switch (task.stage) {
    case Stage::kRows:
      run.table->moe_rows(run.call, task.first, task.end);
      run.rows_left.fetch_sub(1);
      break;
    case Stage::kInner:
      if (!run.wait_for(run.rows_left)) return;
      run.table->moe_inner(run.call, task.slot, task.first, task.end, weights_after(run, at));
      run.inner_left[task.slot].fetch_sub(1);
      break;
    case Stage::kDown:
      if (!run.wait_for(run.inner_left[task.slot])) return;
      run.table->moe_down(run.call, task.slot, task.first, task.end, weights_after(run, at));
      run.down_left.fetch_sub(1);
      break;
    case Stage::kCombine:
      if (!run.wait_for(run.down_left)) return;
      run.table->moe_combine(run.call, task.first, task.end);
      add_all(*run.table, run.call, run.added, task.first, task.end);
      break;
  }
}

// Jobs by (slot, token): choices stand in token order, and a counting sort keeps it.
void sort_choices(MoeRun& run, const MoeLayer& layer, const int64_t* experts, int64_t num_tokens) {
  const int64_t num_jobs = num_tokens * layer.num_choices;
  const int64_t num_experts = static_cast<int64_t>(layer.slot_of_expert.size());
  run.offsets.assign(layer.slots.size() + 1, 0);
  run.place.resize(num_jobs);
  run.choice_of_job.resize(num_jobs);
  run.job_of_choice.resize(num_jobs);
  for (int64_t choice = 0; choice < num_jobs; ++choice) {
    const int64_t expert = experts[choice];
    if (expert < 0 || expert >= num_experts)
      fail(layer.name(), "choice " + std::to_string(choice % layer.num_choices) + " of token " +
                             std::to_string(choice / layer.num_choices) + " is expert " + std::to_string(expert) +
                             ", and experts are 0 to " + std::to_string(num_experts - 1));
    run.place[choice] = static_cast<int32_t>(layer.slot_of_expert[expert]);
    ++run.offsets[run.place[choice] + 1];
  }
  run.active.clear();
  for (size_t slot = 0; slot < layer.slots.size(); ++slot) {
    if (run.offsets[slot + 1] > 0) run.active.push_back(static_cast<int32_t>(slot));
    run.offsets[slot + 1] += run.offsets[slot];
  }
  for (int64_t choice = num_jobs - 1; choice >= 0; --choice) {
    // From the last choice of a slot to its first: its end moves down until it is the slot's start.
    const int32_t job = --run.offsets[run.place[choice] + 1];
    run.choice_of_job[job] = static_cast<int32_t>(choice);
    run.job_of_choice[choice] = job;
  }
  // offsets[slot + 1] is now the start of `slot`.
  for (size_t slot = 0; slot < layer.slots.size(); ++slot) run.offsets[slot] = run.offsets[slot + 1];
  run.offsets[layer.slots.size()] = static_cast<int32_t>(num_jobs);
}

void lay_out(MoeRun& run, const MoeLayer& layer) {
  Moe& call = run.call;
  std::fill(call.form, call.form + kForms, nullptr);
  call.hidden_bytes = 0;
  for (const int32_t slot : run.active) {
    const Expert& expert = layer.slots[slot];
    call.form[form_of(expert.inner)] = &expert.inner;
    call.hidden_bytes = std::max<uint64_t>(call.hidden_bytes, run.table->row_bytes(expert.down));
  }
  for (int form = 0; form < kForms; ++form)
    if (call.form[form] != nullptr)
      call.rows[form] = run.rows[form].of(call.num_rows * run.table->row_bytes(*call.form[form]));
  const size_t num_jobs = run.choice_of_job.size();
  call.hidden = run.hidden.of(num_jobs * call.hidden_bytes);
  call.out = run.out.of(num_jobs * call.width * bytes_of(call.seam));
  call.slots = layer.slots.data();
  call.offsets = run.offsets.data();
  call.choice_of_job = run.choice_of_job.data();
  call.job_of_choice = run.job_of_choice.data();
}

// Tasks of [0, count) by `size`; returns how many.
int64_t add_tasks(MoeRun& run, Stage stage, int64_t count, int64_t size) {
  for (int64_t first = 0; first < count; first += size)
    run.tasks.push_back({stage, 0, first, std::min(first + size, count)});
  return (count + size - 1) / size;
}

// Slots of many jobs beside those of few, and so on inwards: two that are neighbours, first of an even number, are a
// pair. Many rows keep a thread multiplying, few leave it waiting for memory: at once they use both.
void pair_slots(MoeRun& run) {
  const auto rows_of = [&](int32_t slot) { return run.offsets[slot + 1] - run.offsets[slot]; };
  run.by_rows = run.active;
  std::sort(run.by_rows.begin(), run.by_rows.end(), [&](int32_t a, int32_t b) {
    return rows_of(a) != rows_of(b) ? rows_of(a) > rows_of(b) : a < b;
  });
  for (size_t i = 0; i < run.active.size(); ++i)
    run.active[i] = i % 2 == 0 ? run.by_rows[i / 2] : run.by_rows[run.by_rows.size() - 1 - i / 2];
}

// Tasks of a stage of all slots, those of a pair in turn; returns how many.
template <class CutOf>
int64_t add_pairs(MoeRun& run, Stage stage, const CutOf& cut_of) {
  const size_t before = run.tasks.size();
  for (size_t first = 0; first < run.active.size(); first += 2) {
    const size_t num_slots = std::min<size_t>(2, run.active.size() - first);
    Cut cuts[2];
    for (size_t i = 0; i < num_slots; ++i) cuts[i] = cut_of(run.active[first + i]);
    const int64_t most = std::max(cuts[0].num_tasks(), cuts[1].num_tasks());
    for (int64_t task = 0; task < most; ++task)
      for (size_t i = 0; i < num_slots; ++i)
        if (task < cuts[i].num_tasks())
          run.tasks.push_back({stage, run.active[first + i], cuts[i].first(task), cuts[i].first(task + 1)});
  }
  return static_cast<int64_t>(run.tasks.size() - before);
}

void make_tasks(MoeRun& run, const MoeLayer& layer) {
  const Moe& call = run.call;
  run.tasks.clear();
  if (run.inner_left.size() < layer.slots.size())
    run.inner_left = std::vector<std::atomic<int32_t>>(layer.slots.size());
  run.rows_left.store(add_tasks(run, Stage::kRows, call.num_rows, kRowUnit));
  pair_slots(run);
  int64_t all_bytes = 0;
  for (const int32_t slot : run.active) all_bytes += layer.slot_bytes[slot];
  const auto bytes_of_task = [&](int32_t slot) {
    return task_bytes(run.offsets[slot + 1] - run.offsets[slot], all_bytes, run.num_threads);
  };
  add_pairs(run, Stage::kInner, [&](int32_t slot) {
    const int64_t bytes = column_bytes(layer.slots[slot].inner) * (layer.is_gated ? 2 : 1);
    const Cut cut{layer.inner_width, tile_of(bytes, bytes_of_task(slot))};
    run.inner_left[slot].store(static_cast<int32_t>(cut.num_tasks()));
    return cut;
  });
  run.down_left.store(add_pairs(run, Stage::kDown, [&](int32_t slot) {
    // Short at the end, where threads wait for each other.
    const int64_t most = slot == run.active.back() ? kLastTaskBytes : bytes_of_task(slot);
    return Cut{layer.width, tile_of(column_bytes(layer.slots[slot].down), most)};
  }));
  const int64_t products = std::max<int64_t>(1, layer.width * layer.num_choices);
  add_tasks(run, Stage::kCombine, call.num_tokens, std::max<int64_t>(1, kCombineNumbers / products));
}

void count(MoeRun& run, const MoeLayer& layer) {
  ++run.num_launches;
  run.num_jobs += static_cast<int64_t>(run.choice_of_job.size());
  for (const int32_t slot : run.active) run.weight_bytes += layer.slot_bytes[slot];
}

void check_call(const MoeLayer& layer, int64_t num_tokens, int64_t num_x, int64_t num_experts, int64_t num_weights) {
  const std::string name = layer.name();
  check_size(name, "tokens", num_tokens);
  check_size(name, "choices of all tokens", num_tokens * layer.num_choices);
  const auto check_length = [&](const char* which, int64_t found, int64_t each) {
    if (found != num_tokens * each)
      fail(name, std::string(which) + " has " + std::to_string(found) + " numbers, " + std::to_string(num_tokens) +
                     " tokens of " + std::to_string(each) + " need " + std::to_string(num_tokens * each));
  };
  check_length("x", num_x, layer.width);
  check_length("experts", num_experts, layer.num_choices);
  check_length("weights", num_weights, layer.num_choices);
  if (layer.slot_of_expert.empty()) fail(name, "none of its " + std::to_string(layer.slots.size()) + " slots was given an expert");
}

void run_tasks(Kernels& kernels, MoeRun& run, const MoeLayer& layer, double timeout_s) {
  const auto timeout = std::chrono::duration<double>(timeout_s);
  run.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  run.is_late.store(false);
  if (!kernels.team.run_until(static_cast<int64_t>(run.tasks.size()), run_task, &run, run.deadline))
    run.is_late.store(true);
  if (!run.is_late.load()) return;
  kernels.team.break_off();
  throw TimedOut(layer.name() + ": stage " + run.stage() + " did not end within " + std::to_string(timeout_s) + " s");
}

void check_timeout(const MoeLayer& layer, double timeout_s) {
  if (!(timeout_s >= 0.0 && timeout_s <= 1e6))
    fail(layer.name(), "a time-out must be in 0 to 1e6 s, got " + std::to_string(timeout_s));
}

void check_storage(const MoeLayer& layer, int64_t num_tokens, bool is_there) {
  if (num_tokens > 0 && !is_there)
    fail(layer.name(), "a tensor of " + std::to_string(num_tokens) + " tokens has no storage");
}

// Of checked arguments.
void run_moe(Kernels& kernels, const MoeLayer& layer, const void* x, const int64_t* experts, const float* weights,
             const Added& added, void* y, int64_t num_tokens, double timeout_s) {
  std::lock_guard<std::mutex> turn(kernels.turn);
  kernels.team.check();
  MoeRun& run = kernels.moe_run();
  run.table = kernels.table;
  run.num_threads = kernels.team.num_threads();
  sort_choices(run, layer, experts, num_tokens);
  Moe& call = run.call;
  call.width = layer.width;
  call.inner_width = layer.inner_width;
  call.num_choices = layer.num_choices;
  call.is_gated = layer.is_gated;
  call.is_weight_on_input = layer.is_weight_on_input;
  call.seam = layer.seam;
  call.activation = layer.activation;
  call.x = x;
  call.weights = weights;
  call.y = y;
  call.num_tokens = num_tokens;
  call.num_rows = layer.is_weight_on_input ? num_tokens * layer.num_choices : num_tokens;
  run.added = added;
  lay_out(run, layer);
  make_tasks(run, layer);
  count(run, layer);
  run_tasks(kernels, run, layer, timeout_s);
}

void moe(Kernels& kernels, const MoeLayer& layer, uintptr_t x, int64_t num_x, uintptr_t experts, int64_t num_experts,
         uintptr_t weights, int64_t num_weights, uintptr_t y, int64_t num_tokens, double timeout_s) {
  check_call(layer, num_tokens, num_x, num_experts, num_weights);
  check_timeout(layer, timeout_s);
  check_storage(layer, num_tokens, x != 0 && experts != 0 && weights != 0 && y != 0);
  run_moe(kernels, layer, reinterpret_cast<const void*>(x), reinterpret_cast<const int64_t*>(experts),
          reinterpret_cast<const float*>(weights), {}, reinterpret_cast<void*>(y), num_tokens, timeout_s);
}

}  // namespace

void moe_half(Kernels& kernels, const RouterLayer& router, const SharedLayer* shared, const MoeLayer& layer,
              uintptr_t x, int64_t num_x, uintptr_t experts, uintptr_t weights, uintptr_t y, int64_t num_tokens, double timeout_s) {
  check_fit(router, shared, layer);
  check_call(layer, num_tokens, num_x, num_tokens * layer.num_choices, num_tokens * layer.num_choices);
  check_timeout(layer, timeout_s);
  check_storage(layer, num_tokens, x != 0 && experts != 0 && weights != 0 && y != 0);
  MoeRun& run = kernels.moe_run();
  std::lock_guard<std::mutex> half(run.half);
  kernels.team.check();
  const void* of_x = reinterpret_cast<const void*>(x);
  const RouterRows rows{run.normed.of(num_tokens * layer.width * bytes_of(layer.seam)),
                        reinterpret_cast<float*>(run.logits.of(num_tokens * router.weight.columns * sizeof(float))),
                        reinterpret_cast<int64_t*>(experts), reinterpret_cast<float*>(weights)};
  run_router(kernels, router, of_x, num_tokens, rows);
  const void* of_shared =
      shared == nullptr ? nullptr : run_shared(kernels, *shared, rows.normed, num_tokens, run.shared);
  run_moe(kernels, layer, rows.normed, rows.experts, rows.weights, {{of_shared, of_x}}, reinterpret_cast<void*>(y), num_tokens,
          timeout_s);
}

namespace {

const void* check_bias(const std::string& name, const Matrix& weight, uintptr_t bias, int64_t num_bytes) {
  const int64_t expected = weight.columns * (weight.is_packed() ? 4 : bytes_of(weight.kind));
  if (bias != 0 && num_bytes != expected)
    fail(name, "a bias of " + std::to_string(weight.columns) + " numbers has " + std::to_string(num_bytes) +
                   " bytes, not " + std::to_string(expected));
  return reinterpret_cast<const void*>(bias);
}

void add_slot(MoeLayer& layer, uintptr_t inner, int64_t inner_bytes, uintptr_t down, int64_t down_bytes,
              uintptr_t inner_bias, int64_t inner_bias_bytes, uintptr_t down_bias, int64_t down_bias_bytes,
              bool is_bfloat16, int64_t bits, int64_t inner_group, int64_t down_group, bool has_zeros) {
  const std::string name = layer.name() + ", slot " + std::to_string(layer.slots.size());
  const int64_t sections = layer.is_gated ? 2 : 1, columns = sections * layer.inner_width;
  const auto matrix = [&](uintptr_t data, int64_t num_columns, int64_t width, int64_t shards, int64_t group,
                          int64_t num_sections) {
    Matrix of{reinterpret_cast<const void*>(data), num_columns, width, shards,
              is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32, width, bits, group, num_sections, has_zeros};
    if (!of.is_packed() && has_zeros) fail(name, "zero points belong to weights of 4 bits");
    check(of, name);
    return of;
  };
  Expert expert{matrix(inner, columns, layer.width, 1, inner_group, sections),
                matrix(down, layer.width, layer.inner_width, layer.shards, down_group, 1), nullptr, nullptr};
  check_bytes(expert.inner, inner_bytes, name);
  check_bytes(expert.down, down_bytes, name);
  expert.inner_bias = check_bias(name, expert.inner, inner_bias, inner_bias_bytes);
  expert.down_bias = check_bias(name, expert.down, down_bias, down_bias_bytes);
  layer.slots.push_back(expert);
  layer.slot_bytes.push_back(inner_bytes + down_bytes + (inner_bias == 0 ? 0 : inner_bias_bytes) +
                             (down_bias == 0 ? 0 : down_bias_bytes));
}

void set_slots(MoeLayer& layer, const std::vector<int64_t>& slot_of_expert) {
  for (size_t expert = 0; expert < slot_of_expert.size(); ++expert)
    if (slot_of_expert[expert] < 0 || slot_of_expert[expert] >= static_cast<int64_t>(layer.slots.size()))
      fail(layer.name(), "expert " + std::to_string(expert) + " has slot " + std::to_string(slot_of_expert[expert]) +
                             " of " + std::to_string(layer.slots.size()));
  layer.slot_of_expert = slot_of_expert;
}

void make_layer(MoeLayer* self, int64_t layer_idx, int64_t width, int64_t inner_width, int64_t num_choices,
                int64_t shards, bool is_gated, bool is_weight_on_input, int function, float limit, float slope,
                bool is_bfloat16) {
  const std::string name = "experts of layer " + std::to_string(layer_idx);
  check_size(name, "the width", width, 1);
  check_size(name, "the inner width", inner_width, 1);
  check_size(name, "choices", num_choices, 1);
  const Activation activation{static_cast<Function>(function), limit, slope};
  check(activation, is_gated, name);
  new (self) MoeLayer{layer_idx, width, inner_width, num_choices, shards, is_gated, is_weight_on_input,
                      is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32, activation, {}, {}, {}};
}

}  // namespace

void check_fit(const RouterLayer& router, const SharedLayer* shared, const MoeLayer& layer) {
  if (router.width != layer.width || router.gate.chosen != layer.num_choices || router.seam != layer.seam)
    fail(layer.name(), "its router has rows of " + std::to_string(router.width) + " and " +
                           std::to_string(router.gate.chosen) + " choices, not " + std::to_string(layer.width) +
                           " and " + std::to_string(layer.num_choices) + ", or rows of another kind");
  if (shared == nullptr) return;
  const bool is_whole = shared->up.data != nullptr && shared->down.data != nullptr;
  if (shared->width != layer.width || shared->seam != layer.seam)
    fail(layer.name(), "the shared expert has rows of " + std::to_string(shared->width) + ", not " +
                           std::to_string(layer.width) + ", or rows of another kind");
  if (!is_whole || (shared->is_gated && shared->gate.data == nullptr))
    fail(layer.name(), "not all weights of the shared expert were given");
}

void bind_moe(nb::module_& module, nb::class_<Kernels>& kernels) {
  nb::exception<TimedOut>(module, "TimedOut", PyExc_TimeoutError);
  nb::class_<MoeLayer>(module, "MoeLayer")
      .def("__init__", make_layer, nb::arg("layer_idx"), nb::arg("width"), nb::arg("inner_width"),
           nb::arg("num_choices"), nb::arg("shards"), nb::arg("is_gated"), nb::arg("is_weight_on_input"),
           nb::arg("function"), nb::arg("limit"), nb::arg("slope"), nb::arg("is_bfloat16"))
      .def("add_slot", add_slot, nb::arg("inner"), nb::arg("inner_bytes"), nb::arg("down"), nb::arg("down_bytes"),
           nb::arg("inner_bias"), nb::arg("inner_bias_bytes"), nb::arg("down_bias"), nb::arg("down_bias_bytes"),
           nb::arg("is_bfloat16"), nb::arg("bits"), nb::arg("inner_group"), nb::arg("down_group"),
           nb::arg("has_zeros"))
      .def("set_slots", set_slots, nb::arg("slot_of_expert"));
  kernels
      .def("moe", moe, nb::call_guard<nb::gil_scoped_release>(), nb::arg("layer"), nb::arg("x"), nb::arg("num_x"),
           nb::arg("experts"), nb::arg("num_experts"), nb::arg("weights"), nb::arg("num_weights"), nb::arg("y"),
           nb::arg("num_tokens"), nb::arg("timeout_s"))
      .def("moe_half", moe_half, nb::call_guard<nb::gil_scoped_release>(), nb::arg("router"),
           nb::arg("shared").none(), nb::arg("layer"), nb::arg("x"), nb::arg("num_x"), nb::arg("experts"), nb::arg("weights"), nb::arg("y"),
           nb::arg("num_tokens"), nb::arg("timeout_s"))
      .def("moe_counts", [](Kernels& self) {
        std::lock_guard<std::mutex> turn(self.turn);
        const MoeRun& run = self.moe_run();
        return std::make_tuple(run.num_launches, run.num_jobs, run.weight_bytes);
      });
}

}  // namespace moesaic
