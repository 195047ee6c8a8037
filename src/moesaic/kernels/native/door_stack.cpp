// Consecutive layers of one micro-batch in one call, attention and sparse half by turns: bit for bit what the calls of the
// halves give one after the other. Between two layers there is no Python.
//
//   x -> attention -> between -> sparse half -> y -> attention -> between -> sparse half -> y -> ...
//
// Over ranks a call may end before its last layer, where no more can be done in time: `advance` goes on from there.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "doors.hpp"
#include "gqa.hpp"
#include "moe_layer.hpp"
#include "moe_ranks.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int64_t kPlaceNumbers = 8;  // slots, blocks that begin, sequences, ids: an address and a count each
constexpr int64_t kTableNumbers = 4;  // cosines, sines, rows, and numbers in a row

// One layer; others own it all. Over ranks the sparse half is theirs.
struct StackLayer {
  const GqaLayer* attention;
  const RouterLayer* router;
  const SharedLayer* shared;
  const MoeLayer* experts;
  RankLayer* ranks;  // null: all experts are here
  KvPools pools;
  int64_t places, rope;  // which of a step's; -1: nothing turns
};

// What a step brings to all layers.
struct StackStep {
  uintptr_t x;
  int64_t num_x;
  uintptr_t y;
  int64_t num_tokens;
  uintptr_t positions;          // [T] int64
  std::vector<int64_t> places;  // kPlaceNumbers for each group of layers with places of their own
  std::vector<int64_t> tables;  // kTableNumbers for each rotation: rows by position
  uintptr_t experts, weights;   // [layers, T, K] int64 and float32: written
  int64_t epoch, plan_version, step_id;
};

class Stack {
 public:
  Stack(Kernels& kernels, int64_t num_places, int64_t num_ropes)
      : kernels_(kernels), num_places_(num_places), num_ropes_(num_ropes) {
    check_size("layers", "groups with places", num_places, 1);
    check_size("layers", "rotations", num_ropes);
  }

  void add(const StackLayer& layer) {
    const std::string name = layer.experts->name();
    const GqaLayer& attention = *layer.attention;
    if (attention.width != layer.experts->width || attention.seam != layer.experts->seam)
      fail(name, "its attention has rows of " + std::to_string(attention.width) + ", not " +
                     std::to_string(layer.experts->width) + ", or rows of another kind");
    if (!layers_.empty() && attention.width != layers_.front().attention->width)
      fail(name, "the layers before it have rows of " + std::to_string(layers_.front().attention->width) + ", not " +
                     std::to_string(attention.width));
    if (layer.places < 0 || layer.places >= num_places_)
      fail(name, "places " + std::to_string(layer.places) + " of " + std::to_string(num_places_));
    if (layer.rope < -1 || layer.rope >= num_ropes_ || (layer.rope < 0) != (attention.half == 0))
      fail(name, "rotation " + std::to_string(layer.rope) + " of " + std::to_string(num_ropes_) + ", " +
                     std::to_string(attention.half) + " pairs turn");
    if (layer.ranks != nullptr && layer.ranks->router == nullptr) fail(name, "its call begins with the router");
    layers_.push_back(layer);
  }

  // How many layers are over: all of them, or as many as time allows. Each may wait for so long.
  int64_t begin(StackStep step, double timeout_s) {
    check(step);
    step_ = std::move(step);
    at_ = num_choices_ = 0;
    is_begun_ = false;
    turn_tables();
    return advance(timeout_s);
  }

  int64_t advance(double timeout_s) {
    since_ = Clock::now();
    while (at_ < num_layers()) {
      const StackLayer& layer = layers_[at_];
      const bool is_over = is_begun_ ? advance_turn(layer.ranks->ranks, timeout_s) : start(layer, timeout_s);
      if (!is_over) return at_;
      is_begun_ = false;
      num_choices_ += step_.num_tokens * layer.experts->num_choices;
      ++at_;
    }
    return at_;
  }

  // Whom the layer that is not over waits for: rank, layer, stage, and for how many seconds it has.
  std::tuple<int, int64_t, std::string, double> late() const {
    if (at_ >= num_layers() || !is_begun_) fail("layers", "none waits for another rank");
    const MoeRanks::Late late = layers_[at_].ranks->ranks.late();
    const std::chrono::duration<double> waited = Clock::now() - since_;
    return {late.rank, layers_[at_].experts->layer_idx, late.stage, waited.count()};
  }

 private:
  int64_t num_layers() const { return static_cast<int64_t>(layers_.size()); }

  std::string name() const {
    return layers_.empty() ? "no layers"
                           : "layers " + std::to_string(layers_.front().experts->layer_idx) + " to " +
                                 std::to_string(layers_.back().experts->layer_idx);
  }

  void check(const StackStep& step) const {
    const int64_t num_tokens = step.num_tokens;
    if (layers_.empty()) fail(name(), "a call has one at least");
    check_size(name(), "tokens", num_tokens);
    const int64_t width = layers_.front().attention->width;
    if (step.num_x != num_tokens * width)
      fail(name(), "x has " + std::to_string(step.num_x) + " numbers, " + std::to_string(num_tokens) + " rows of " +
                       std::to_string(width) + " have " + std::to_string(num_tokens * width));
    const auto check_count = [&](const char* which, size_t found, int64_t count, int64_t each) {
      if (static_cast<int64_t>(found) != count * each)
        fail(name(), std::string(which) + " are " + std::to_string(count) + " times " + std::to_string(each) +
                         " numbers, got " + std::to_string(found));
    };
    check_count("places", step.places.size(), num_places_, kPlaceNumbers);
    check_count("tables", step.tables.size(), num_ropes_, kTableNumbers);
    for (int64_t at = 0; at < num_places_; ++at)
      if (step.places[at * kPlaceNumbers + 1] != num_tokens)
        fail(name(), std::to_string(step.places[at * kPlaceNumbers + 1]) + " slots for " + std::to_string(num_tokens) +
                         " tokens");
    if (num_tokens == 0) return;
    if (step.x == 0 || step.y == 0 || step.experts == 0 || step.weights == 0 || step.positions == 0)
      fail(name(), "a tensor of " + std::to_string(num_tokens) + " tokens has no storage");
    const int64_t* positions = reinterpret_cast<const int64_t*>(step.positions);
    for (int64_t rope = 0; rope < num_ropes_; ++rope) {
      const int64_t* table = &step.tables[rope * kTableNumbers];
      if (table[0] == 0 || table[1] == 0) fail(name(), "a table of rotations has no storage");
      check_size(name(), "numbers of a rotation", table[3], 1);
      for (int64_t token = 0; token < num_tokens; ++token)
        if (positions[token] < 0 || positions[token] >= table[2])
          fail(name(), "token " + std::to_string(token) + " has position " + std::to_string(positions[token]) +
                           ", the table of rotations has " + std::to_string(table[2]));
    }
    for (const StackLayer& layer : layers_)
      if (layer.rope >= 0 && step.tables[layer.rope * kTableNumbers + 3] != layer.attention->half)
        fail(layer.attention->name, std::to_string(layer.attention->half) + " pairs turn, the table has " +
                                        std::to_string(step.tables[layer.rope * kTableNumbers + 3]));
  }

  // The rows of each rotation's tables at the positions of this step.
  void turn_tables() {
    const int64_t num_tokens = step_.num_tokens;
    const int64_t* positions = reinterpret_cast<const int64_t*>(step_.positions);
    turned_.resize(num_ropes_);
    for (int64_t rope = 0; num_tokens > 0 && rope < num_ropes_; ++rope) {
      const int64_t* table = &step_.tables[rope * kTableNumbers];
      const int64_t width = table[3];
      float* to = reinterpret_cast<float*>(turned_[rope].of(2 * num_tokens * width * sizeof(float)));
      for (const int64_t address : {table[0], table[1]}) {
        const float* from = reinterpret_cast<const float*>(address);
        for (int64_t token = 0; token < num_tokens; ++token, to += width)
          std::memcpy(to, from + positions[token] * width, width * sizeof(float));
      }
    }
  }

  uintptr_t between() {
    const GqaLayer& first = *layers_.front().attention;
    return reinterpret_cast<uintptr_t>(between_.of(step_.num_x * bytes_of(first.seam)));
  }

  void attend(const StackLayer& layer) {
    const GqaLayer& attention = *layer.attention;
    const int64_t* places = &step_.places[layer.places * kPlaceNumbers];
    const int64_t angles = step_.num_tokens * attention.half;
    const float* table = angles == 0 ? nullptr : reinterpret_cast<const float*>(turned_[layer.rope].of(0));
    const uintptr_t cosines = reinterpret_cast<uintptr_t>(table), sines = reinterpret_cast<uintptr_t>(table + angles);
    const auto address = [&](int64_t at) { return static_cast<uintptr_t>(places[at]); };
    run_gqa(kernels_, attention,
            {at_ == 0 ? step_.x : step_.y, step_.num_x, between(), cosines, sines, angles, layer.pools, address(0),
             {address(4), places[5], address(6), places[7], places[1], address(2), places[3]}});
  }

  // A layer from its start; whether it was over in time.
  bool start(const StackLayer& layer, double timeout_s) {
    attend(layer);
    const uintptr_t experts = step_.experts + num_choices_ * sizeof(int64_t);
    const uintptr_t weights = step_.weights + num_choices_ * sizeof(float);
    if (layer.ranks == nullptr) {
      moe_half(kernels_, *layer.router, layer.shared, *layer.experts, between(), step_.num_x, experts, weights, step_.y,
               step_.num_tokens, timeout_s);
      return true;
    }
    since_ = Clock::now();
    is_begun_ = true;
    return begin_turn(*layer.ranks, between(), step_.num_x, experts, weights, step_.y, step_.num_tokens, step_.epoch,
                      step_.plan_version, step_.step_id, timeout_s);
  }

  Kernels& kernels_;
  const int64_t num_places_, num_ropes_;
  std::vector<StackLayer> layers_;
  StackStep step_{};
  int64_t at_ = 0, num_choices_ = 0;  // layers that are over, and their choices
  bool is_begun_ = false;             // a turn of ranks that is not over
  Clock::time_point since_{};         // when it was begun or taken up again
  std::vector<Buffer> turned_;        // by rotation: cosines and sines of all tokens
  Buffer between_;
};

void add(Stack& stack, const GqaLayer& attention, const RouterLayer& router, const SharedLayer* shared,
         const MoeLayer& experts, uintptr_t keys, int64_t key_bytes, uintptr_t values, int64_t value_bytes,
         int64_t pool_kind, int64_t places, int64_t rope) {
  check_fit(router, shared, experts);
  stack.add({&attention, &router, shared, &experts, nullptr, {keys, key_bytes, values, value_bytes, pool_kind}, places,
             rope});
}

void add_ranks(Stack& stack, const GqaLayer& attention, RankLayer& ranks, uintptr_t keys, int64_t key_bytes,
               uintptr_t values, int64_t value_bytes, int64_t pool_kind, int64_t places, int64_t rope) {
  stack.add({&attention, nullptr, nullptr, &ranks.layer, &ranks, {keys, key_bytes, values, value_bytes, pool_kind},
             places, rope});
}

int64_t begin(Stack& stack, uintptr_t x, int64_t num_x, uintptr_t y, int64_t num_tokens, uintptr_t positions,
              std::vector<int64_t> places, std::vector<int64_t> tables, uintptr_t experts, uintptr_t weights,
              int64_t epoch, int64_t plan_version, int64_t step_id, double timeout_s) {
  return stack.begin({x, num_x, y, num_tokens, positions, std::move(places), std::move(tables), experts, weights, epoch,
                      plan_version, step_id},
                     timeout_s);
}

}  // namespace

void bind_stack(nb::module_& module) {
  nb::class_<Stack>(module, "Stack")
      .def(nb::init<Kernels&, int64_t, int64_t>(), nb::arg("kernels"), nb::arg("num_places"), nb::arg("num_ropes"),
           nb::keep_alive<1, 2>())
      .def("add", add, nb::arg("attention"), nb::arg("router"), nb::arg("shared").none(), nb::arg("experts"),
           nb::arg("keys"), nb::arg("key_bytes"), nb::arg("values"), nb::arg("value_bytes"), nb::arg("pool_kind"),
           nb::arg("places"), nb::arg("rope"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
           nb::keep_alive<1, 5>())
      .def("add_ranks", add_ranks, nb::arg("attention"), nb::arg("ranks"), nb::arg("keys"), nb::arg("key_bytes"),
           nb::arg("values"), nb::arg("value_bytes"), nb::arg("pool_kind"), nb::arg("places"), nb::arg("rope"),
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("begin", begin, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("num_x"), nb::arg("y"),
           nb::arg("num_tokens"), nb::arg("positions"), nb::arg("places"), nb::arg("tables"), nb::arg("experts"),
           nb::arg("weights"), nb::arg("epoch"), nb::arg("plan_version"), nb::arg("step_id"), nb::arg("timeout_s"))
      .def("advance", &Stack::advance, nb::call_guard<nb::gil_scoped_release>(), nb::arg("timeout_s"))
      .def("late", &Stack::late);
}

}  // namespace moesaic
