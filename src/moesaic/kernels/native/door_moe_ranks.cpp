// The routed experts of a layer over all ranks of a machine: see moe_ranks.hpp.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <numeric>
#include <tuple>

#include "check.hpp"
#include "doors.hpp"
#include "moe_ranks.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr size_t kBlocksAtOnce = 64;  // looked at while nothing else is to be done

int64_t whole_lines(int64_t num_bytes) { return (num_bytes + kLine - 1) / kLine * kLine; }

int64_t ns_since(Clock::time_point began) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count();
}

}  // namespace

MoeRanks::MoeRanks(Kernels& kernels, const Wire& wire, int64_t lane, int64_t max_choices, int64_t* sent,
                   int64_t* returned)
    : kernels_(kernels), wire_(wire), lane_(lane), max_choices_(max_choices), sent_(sent), returned_(returned),
      sources_(wire.num_ranks), groups_(kernels.team.num_threads() + 1) {}

std::atomic<uint64_t>* MoeRanks::flags_of(int rank) const {
  return reinterpret_cast<std::atomic<uint64_t>*>(wire_.returns(lane_, rank));
}

uint8_t* MoeRanks::results_of(int rank) const {
  return wire_.returns(lane_, rank) + whole_lines(max_choices_ * 8);
}

// ---- sending ----

// Choices by (rank, slot, token): a counting sort by place, which keeps the order of tokens.
void MoeRanks::sort(const RankCall& call) {
  const SlotTable& table = *call.slots;
  const int64_t num_choices = call.layer->num_choices, num_jobs = call.num_tokens * num_choices;
  place_.resize(num_jobs);
  order_.resize(num_jobs);
  offsets_.assign(table.slots.empty() ? 1 : table.place.size() + 1, 0);
  for (int64_t choice = 0; choice < num_jobs; ++choice) {
    const int64_t expert = call.experts[choice], token = choice / num_choices;
    if (expert < 0 || expert >= table.num_experts)
      fail(call.layer->name(), "choice " + std::to_string(choice % num_choices) + " of token " + std::to_string(token) +
                                   " is expert " + std::to_string(expert) + ", and experts are 0 to " +
                                   std::to_string(table.num_experts - 1));
    place_[choice] = table.place[table.slots[expert * table.num_variants + (token + call.first) % table.num_variants]];
    ++offsets_[place_[choice] + 1];
  }
  std::partial_sum(offsets_.begin(), offsets_.end(), offsets_.begin());
  std::vector<int64_t>& next = pending_;  // free until the sources are looked at
  next.assign(offsets_.begin(), offsets_.end());
  for (int64_t choice = 0; choice < num_jobs; ++choice) order_[next[place_[choice]]++] = static_cast<int32_t>(choice);
}

void MoeRanks::send(int to) {
  const SlotTable& table = *call_.slots;
  const int64_t first_place = table.first_place[to], end_place = table.first_place[to + 1];
  const int64_t first = offsets_[first_place], num_jobs = offsets_[end_place] - first, bytes = row_bytes();
  Head& head = wire_.head(lane_, to, wire_.rank, turn_ - 1);
  uint8_t* body = Wire::body(head);
  RankJob* jobs = reinterpret_cast<RankJob*>(body + sizeof(RankHead));
  uint8_t* rows = body + sizeof(RankHead) + num_jobs * sizeof(RankJob);
  row_of_.assign(call_.num_tokens, -1);
  int32_t num_rows = 0;
  int64_t at = first;
  for (int64_t place = first_place; place < end_place; ++place) {
    for (; at < offsets_[place + 1]; ++at) {
      const int32_t choice = order_[at];
      const int64_t token = choice / call_.layer->num_choices;
      if (row_of_[token] < 0) {
        std::memcpy(rows + num_rows * bytes, call_.x + token * bytes, static_cast<size_t>(bytes));
        row_of_[token] = num_rows++;
      }
      jobs[at - first] = {row_of_[token], static_cast<int32_t>(place - first_place), choice, call_.weights[choice]};
    }
  }
  const RankHead told{static_cast<int32_t>(call_.epoch), static_cast<int32_t>(call_.plan_version),
                      static_cast<int32_t>(call_.step_id), static_cast<int32_t>(call_.layer->layer_idx), num_rows,
                      static_cast<int32_t>(num_jobs), {0, 0}};
  std::memcpy(body, &told, sizeof told);
  head.num_bytes = static_cast<int64_t>(sizeof(RankHead) + num_jobs * sizeof(RankJob)) + num_rows * bytes;
  sent_[to] += head.num_bytes;
  head.turn.store(turn_, std::memory_order_release);
  wire_.ring(to);
}

// A rank's own rows stay where they are.
void MoeRanks::take_own() {
  const SlotTable& table = *call_.slots;
  const int64_t first_place = table.first_place[wire_.rank], end_place = table.first_place[wire_.rank + 1];
  const int64_t first = offsets_[first_place];
  own_jobs_.resize(offsets_[end_place] - first);
  int64_t at = first;
  for (int64_t place = first_place; place < end_place; ++place)
    for (; at < offsets_[place + 1]; ++at)
      own_jobs_[at - first] = {static_cast<int32_t>(order_[at] / call_.layer->num_choices),
                               static_cast<int32_t>(place - first_place), order_[at], call_.weights[order_[at]]};
  Source& own = sources_[wire_.rank];
  own.rows = call_.x;
  own.jobs = own_jobs_.data();
  index(own, static_cast<int64_t>(own_jobs_.size()));
}

const uint8_t* MoeRanks::route(const RouterLayer& router, const void* x, int64_t num_tokens, int64_t* experts,
                               float* weights) {
  const RouterRows rows{normed_.of(num_tokens * router.width * bytes_of(router.seam)),
                        reinterpret_cast<float*>(logits_.of(num_tokens * router.weight.columns * sizeof(float))),
                        experts, weights};
  run_router(kernels_, router, x, num_tokens, rows);
  return rows.normed;
}

void MoeRanks::share(const SharedLayer& shared) {
  call_.added.rows[0] = run_shared(kernels_, shared, call_.x, call_.num_tokens, shared_);
}

void MoeRanks::check(const MoeLayer& layer, const SlotTable& slots, int64_t num_tokens) const {
  const int64_t num_choices = num_tokens * layer.num_choices;
  const int64_t needed = num_choices * layer.width * bytes_of(layer.seam);
  const int64_t sent = static_cast<int64_t>(sizeof(RankHead)) + num_choices * static_cast<int64_t>(sizeof(RankJob)) +
                       num_tokens * layer.width * bytes_of(layer.seam);
  if (!is_over_) fail(layer.name(), "the turn before is not over");
  if (num_choices > max_choices_ || whole_lines(max_choices_ * 8) + needed > wire_.lane(lane_).return_bytes ||
      sent > wire_.lane(lane_).inbox_bytes)
    fail(layer.name(), std::to_string(num_tokens) + " tokens are more than the memory that ranks share is made for");
  if (static_cast<int>(slots.first_place.size()) != wire_.num_ranks + 1)
    fail(layer.name(), "its slots are on other ranks than there are");
}

void MoeRanks::begin(const RankCall& call) {
  const MoeLayer& layer = *call.layer;
  const Clock::time_point began = Clock::now();
  sort(call);
  call_ = call;
  ++turn_;
  is_over_ = false;
  error_.clear();
  iota_.resize(std::max<size_t>(iota_.size(), call.num_tokens * layer.num_choices));
  std::iota(iota_.begin(), iota_.end(), 0);
  for (int step = 1; step < wire_.num_ranks; ++step) send((wire_.rank + step) % wire_.num_ranks);
  send_ns += ns_since(began);

  const size_t num_slots = layer.slots.size();
  pending_.assign(num_slots, 0);
  num_pending_ = cursor_ = 0;
  num_absent_ = wire_.num_ranks - 1;
  for (Source& source : sources_) source.is_here = false;
  take_own();
  combine_ = Moe{};
  combine_.width = layer.width;
  combine_.num_choices = layer.num_choices;
  combine_.is_weight_on_input = layer.is_weight_on_input;
  combine_.seam = layer.seam;
  combine_.weights = call.weights;
  combine_.y = call.y;
  combine_.job_of_choice = iota_.data();
  combine_.out = results_of(wire_.rank);
  blocks_.clear();
  next_block_ = 0;
  const int64_t size = std::max<int64_t>(1, kCombineNumbers / std::max<int64_t>(1, layer.width * layer.num_choices));
  for (int64_t first = 0; first < call.num_tokens; first += size)
    blocks_.push_back({first, std::min(first + size, call.num_tokens), 0});
  ++num_launches;
}

// ---- what to do next; all under the lock but `index` of the own rows ----

void MoeRanks::index(Source& source, int64_t num_jobs) {
  const size_t num_slots = call_.layer->slots.size();
  source.first.assign(num_slots + 1, 0);
  source.is_opened.assign(num_slots, 0);
  for (int64_t job = 0; job < num_jobs; ++job) {
    const int32_t slot = source.jobs[job].slot;
    if (slot < 0 || static_cast<size_t>(slot) >= num_slots) {
      error_ = "another rank sent a job for slot " + std::to_string(slot) + " of " + std::to_string(num_slots) +
               ": ranks have different plans";
      return;
    }
    ++source.first[slot + 1];
    ++pending_[slot];
  }
  std::partial_sum(source.first.begin(), source.first.end(), source.first.begin());
  num_pending_ += num_jobs;
  this->num_jobs += num_jobs;
  source.is_here = true;
}

void MoeRanks::look_for_sources() {
  for (int from = 0; num_absent_ > 0 && from < wire_.num_ranks; ++from) {
    Source& source = sources_[from];
    if (source.is_here || from == wire_.rank) continue;
    Head& head = wire_.head(lane_, wire_.rank, from, turn_ - 1);
    if (head.turn.load(std::memory_order_acquire) != turn_) continue;
    RankHead told;
    std::memcpy(&told, Wire::body(head), sizeof told);
    if (told.epoch != call_.epoch || told.plan_version != call_.plan_version || told.step_id != call_.step_id ||
        told.layer_idx != call_.layer->layer_idx) {
      error_ = "ranks are out of step: this rank is at step " + std::to_string(call_.step_id) + " under plan " +
               std::to_string(call_.plan_version) + ", rank " + std::to_string(from) + " sent for step " +
               std::to_string(told.step_id) + ", layer " + std::to_string(told.layer_idx) + " under plan " +
               std::to_string(told.plan_version);
      return;
    }
    source.jobs = reinterpret_cast<const RankJob*>(Wire::body(head) + sizeof(RankHead));
    source.rows = reinterpret_cast<const uint8_t*>(source.jobs + told.num_jobs);
    index(source, told.num_jobs);
    --num_absent_;
  }
}

// The next slot that has jobs, with all of them that are here.
bool MoeRanks::open(Group& group) {
  if (num_pending_ == 0) return false;
  const int64_t num_slots = static_cast<int64_t>(pending_.size());
  while (pending_[cursor_ % num_slots] == 0) ++cursor_;
  group.slot = cursor_++ % num_slots;
  group.state = State::kFilling;
  group.jobs.clear();
  group.source_of_job.clear();
  for (int from = 0; from < wire_.num_ranks; ++from) {
    Source& source = sources_[from];
    if (!source.is_here || source.is_opened[group.slot]) continue;
    source.is_opened[group.slot] = 1;
    for (int32_t job = source.first[group.slot]; job < source.first[group.slot + 1]; ++job) {
      group.jobs.push_back(source.jobs + job);
      group.source_of_job.push_back(from);
    }
  }
  num_pending_ -= pending_[group.slot];
  pending_[group.slot] = 0;
  weight_bytes += call_.layer->slot_bytes[group.slot];
  return true;
}

bool MoeRanks::pick_block(Pick& pick) {
  const std::atomic<uint64_t>* flags = flags_of(wire_.rank);
  const int64_t num_choices = call_.layer->num_choices;
  for (size_t looked = std::min(kBlocksAtOnce, blocks_.size()); looked > 0; --looked) {
    if (next_block_ >= blocks_.size()) next_block_ = 0;
    Block& block = blocks_[next_block_];
    const int64_t first = block.first * num_choices, count = block.end * num_choices - first;
    while (block.seen < count && flags[first + block.seen].load(std::memory_order_acquire) == turn_) ++block.seen;
    if (block.seen == count) {
      pick = {Kind::kCombine, nullptr, block.first, block.end};
      block = blocks_.back();
      blocks_.pop_back();
      return true;
    }
    ++next_block_;
  }
  return false;
}

// Under the lock.
void MoeRanks::set_idle(bool& was_idle, bool is_idle) {
  if (was_idle == is_idle) return;
  was_idle = is_idle;
  num_busy_ += is_idle ? -1 : 1;
  if (num_busy_ == 0) idle_since_ = Clock::now();
  if (num_busy_ == 1 && !is_idle) wait_ns += ns_since(idle_since_);
}

MoeRanks::Pick MoeRanks::next() {
  if (!error_.empty()) return {Kind::kOver, nullptr, 0, 0};
  Group* free = nullptr;
  bool is_filling = false;
  for (Group& group : groups_) {
    // Nobody waits for hidden rows that another thread still computes: there may be another slot to open.
    const bool has_task = group.state == State::kOpen && group.next_task < group.num_tasks;
    if (has_task && (group.next_task < group.num_inner || group.inner_left.load() == 0))
      return {Kind::kTask, &group, group.next_task++, 0};
    if (group.state == State::kFree) free = &group;
    is_filling |= group.state == State::kFilling;
  }
  look_for_sources();
  if (free != nullptr && error_.empty() && open(*free)) return {Kind::kFill, free, 0, 0};
  Pick pick{Kind::kNothing, nullptr, 0, 0};
  if (pick_block(pick)) return pick;
  if (num_absent_ == 0 && num_pending_ == 0 && !is_filling && blocks_.empty()) pick.kind = Kind::kOver;
  return pick;
}

void MoeRanks::work() {
  RankPatience patience;
  bool is_idle = true;
  while (true) {
    const uint32_t heard = wire_.heard();
    Pick pick;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      pick = next();
      set_idle(is_idle, pick.kind == Kind::kNothing || pick.kind == Kind::kOver);
    }
    switch (pick.kind) {
      case Kind::kOver:
        if (kernels_.team.num_threads() > 1) wire_.ring(wire_.rank);  // others of this team may sleep
        return;
      case Kind::kNothing: {
        if (!patience.wait(wire_, heard, deadline_)) return;
        if (!patience.has_slept) continue;
        std::lock_guard<std::mutex> lock(mutex_);
        const Late missed = late();
        const int dead = wire_.find_dead([&](int rank) {
          return rank == missed.rank || (rank != wire_.rank && !sources_[rank].is_here);
        });
        if (dead < 0) continue;
        dead_.store(dead);
        return;
      }
      case Kind::kFill:
        fill(*pick.group);
        break;
      case Kind::kTask:
        run_task(*pick.group, pick.at);
        break;
      case Kind::kCombine:
        combine(pick.at, pick.end);
        break;
    }
    patience = RankPatience();
  }
}

// ---- doing it ----

void MoeRanks::fill(Group& group) {
  const MoeLayer& layer = *call_.layer;
  const LevelTable& table = *kernels_.table;
  const Expert& expert = layer.slots[group.slot];
  const int64_t num_jobs = static_cast<int64_t>(group.jobs.size()), bytes = row_bytes();
  Moe& call = group.call;
  call = Moe{};
  call.slots = &expert;
  call.width = layer.width;
  call.inner_width = layer.inner_width;
  call.num_choices = 1;
  call.is_gated = layer.is_gated;
  call.seam = layer.seam;
  call.activation = layer.activation;
  call.num_tokens = call.num_rows = num_jobs;
  group.offsets[1] = static_cast<int32_t>(num_jobs);
  call.offsets = group.offsets;
  group.rows_of_jobs.resize(num_jobs);
  std::iota(group.rows_of_jobs.begin(), group.rows_of_jobs.end(), 0);
  call.choice_of_job = group.rows_of_jobs.data();
  const int form = form_of(expert.inner);
  const int64_t form_bytes = static_cast<int64_t>(table.row_bytes(expert.inner));
  call.form[form] = &expert.inner;
  call.hidden_bytes = table.row_bytes(expert.down);
  call.hidden = group.hidden.of(num_jobs * call.hidden_bytes);
  call.out = group.out.of(num_jobs * bytes);
  uint8_t* rows = group.rows.of(num_jobs * form_bytes);
  call.rows[form] = rows;

  // A job's row by itself: rows of a group come from several ranks.
  const int32_t zero = 0;
  Moe row = call;
  row.is_weight_on_input = layer.is_weight_on_input;
  row.choice_of_job = &zero;
  for (int64_t job = 0; job < num_jobs; ++job) {
    row.x = sources_[group.source_of_job[job]].rows + group.jobs[job]->row * bytes;
    row.weights = &group.jobs[job]->weight;
    row.rows[form] = rows + job * form_bytes;
    table.moe_rows(row, 0, 1);
  }
  const int64_t most = task_bytes(num_jobs, layer.slot_bytes[group.slot], kernels_.team.num_threads());
  group.inner_tile = tile_of(column_bytes(expert.inner) * (layer.is_gated ? 2 : 1), most);
  group.down_tile = tile_of(column_bytes(expert.down), most);
  group.num_inner = (layer.inner_width + group.inner_tile - 1) / group.inner_tile;
  const int64_t num_down = (layer.width + group.down_tile - 1) / group.down_tile;
  group.inner_left.store(group.num_inner);
  group.down_left.store(num_down);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    group.num_tasks = group.num_inner + num_down;
    group.next_task = 0;
    group.state = State::kOpen;
  }
  if (kernels_.team.num_threads() > 1) wire_.ring(wire_.rank);
}

// Where the weights begin of the task after this one, which the same thread is likely to take; null after the last.
const uint8_t* MoeRanks::weights_after(const Group& group, int64_t task) const {
  const Expert& expert = call_.layer->slots[group.slot];
  if (++task < group.num_inner) return expert.inner.strip(0, task * group.inner_tile);
  const int64_t first = (task - group.num_inner) * group.down_tile;
  return first < call_.layer->width ? expert.down.strip(0, first) : nullptr;
}

void MoeRanks::run_task(Group& group, int64_t task) {
  const MoeLayer& layer = *call_.layer;
  const uint8_t* then = weights_after(group, task);
  if (task < group.num_inner) {
    const int64_t first = task * group.inner_tile;
    kernels_.table->moe_inner(group.call, 0, first, std::min(first + group.inner_tile, layer.inner_width), then);
    if (group.inner_left.fetch_sub(1) == 1 && kernels_.team.num_threads() > 1) wire_.ring(wire_.rank);
    return;
  }
  const int64_t first = (task - group.num_inner) * group.down_tile;
  kernels_.table->moe_down(group.call, 0, first, std::min(first + group.down_tile, layer.width), then);
  if (group.down_left.fetch_sub(1) == 1) finish(group);
}

void MoeRanks::combine(int64_t first, int64_t end) {
  kernels_.table->moe_combine(combine_, first, end);
  add_all(*kernels_.table, combine_, call_.added, first, end);
}

// Every result to where it is asked for.
void MoeRanks::finish(Group& group) {
  const int64_t bytes = row_bytes(), num_jobs = static_cast<int64_t>(group.jobs.size());
  const uint8_t* out = static_cast<const uint8_t*>(group.call.out);
  const Clock::time_point began = Clock::now();
  int64_t num_sent = 0;
  for (int64_t job = 0; job < num_jobs; ++job) {
    const int to = group.source_of_job[job];
    const int64_t choice = group.jobs[job]->choice;
    std::memcpy(results_of(to) + choice * bytes, out + job * bytes, static_cast<size_t>(bytes));
    flags_of(to)[choice].store(turn_, std::memory_order_release);
    const bool is_last = job + 1 == num_jobs || group.source_of_job[job + 1] != to;
    if (is_last && to != wire_.rank) wire_.ring(to);
    num_sent += to != wire_.rank;
  }
  const int64_t sent_ns = num_sent == 0 ? 0 : ns_since(began) / kernels_.team.num_threads();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    send_ns += sent_ns;
    for (const int to : group.source_of_job)
      if (to != wire_.rank) returned_[to] += bytes;
    group.state = State::kFree;
  }
  if (kernels_.team.num_threads() > 1) wire_.ring(wire_.rank);
}

bool MoeRanks::advance(Clock::time_point deadline) {
  if (is_over_) return true;
  deadline_ = deadline;
  dead_.store(-1);
  num_busy_ = 0;
  idle_since_ = Clock::now();
  kernels_.team.run(
      kernels_.team.num_threads(), [](void* self, int64_t) { static_cast<MoeRanks*>(self)->work(); }, this);
  if (!error_.empty()) fail(call_.layer->name(), error_);
  bool is_idle = num_absent_ == 0 && num_pending_ == 0 && blocks_.empty();
  for (const Group& group : groups_) is_idle &= group.state == State::kFree;
  is_over_ = is_idle;
  if (!is_over_) wait_ns += ns_since(idle_since_);  // nothing could be done in time
  return is_over_;
}

MoeRanks::Late MoeRanks::late() const {
  if (const int dead = dead_.load(); dead >= 0)
    return {dead, sources_[dead].is_here ? "collect" : "send"};
  for (int rank = 0; rank < wire_.num_ranks; ++rank)
    if (!sources_[rank].is_here) return {rank, "send"};
  const std::vector<int64_t>& first_place = call_.slots->first_place;
  for (const Block& block : blocks_) {
    const int64_t choice = block.first * call_.layer->num_choices + block.seen;
    const auto after = std::upper_bound(first_place.begin(), first_place.end(), place_[choice]);
    return {static_cast<int>(after - first_place.begin()) - 1, "collect"};
  }
  return {wire_.rank, "experts"};
}

// ---- the door ----

namespace {

void make_table(SlotTable* self, int64_t num_experts, const std::vector<int64_t>& slots,
                const std::vector<int64_t>& rank_of, int num_ranks) {
  const std::string name = "slots";
  const int64_t num_slots = static_cast<int64_t>(rank_of.size());
  if (num_experts < 1 || slots.empty() || slots.size() % static_cast<size_t>(num_experts) != 0)
    fail(name, std::to_string(slots.size()) + " choices for " + std::to_string(num_experts) + " experts");
  for (const int64_t slot : slots)
    if (slot < 0 || slot >= num_slots)
      fail(name, "slot " + std::to_string(slot) + " is chosen, there are " + std::to_string(num_slots));
  std::vector<int64_t> first(num_ranks + 1, 0), place(num_slots);
  for (const int64_t rank : rank_of) {
    if (rank < 0 || rank >= num_ranks)
      fail(name, "a slot is on rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
    ++first[rank + 1];
  }
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<int64_t> next = first;
  for (int64_t slot = 0; slot < num_slots; ++slot) place[slot] = next[rank_of[slot]]++;
  new (self) SlotTable{num_experts, static_cast<int64_t>(slots.size()) / num_experts, slots, std::move(place),
                       std::move(first)};
}

void make_ranks(MoeRanks* self, Kernels& kernels, Wire& wire, int64_t lane, int64_t max_choices, uintptr_t sent,
                uintptr_t returned) {
  if (lane < 0 || lane >= wire.num_lanes())
    fail("experts over ranks", "lane " + std::to_string(lane) + " of " + std::to_string(wire.num_lanes()));
  new (self) MoeRanks(kernels, wire, lane, max_choices, reinterpret_cast<int64_t*>(sent),
                      reinterpret_cast<int64_t*>(returned));
}

Clock::time_point deadline_of(double timeout_s) {
  if (!(timeout_s >= 0.0 && timeout_s <= 1e6))
    fail("experts over ranks", "a time-out must be in 0 to 1e6 s, got " + std::to_string(timeout_s));
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
}

void make_layer(RankLayer* self, MoeRanks& ranks, const RouterLayer* router, const SharedLayer* shared,
                const MoeLayer& layer, const SlotTable& slots, int64_t first) {
  if (router == nullptr && shared != nullptr) fail(layer.name(), "a shared expert comes with a router");
  if (router != nullptr) check_fit(*router, shared, layer);
  new (self) RankLayer{ranks, router, shared, layer, slots, first};
}

}  // namespace

bool advance_turn(MoeRanks& ranks, double timeout_s) {
  const Clock::time_point deadline = deadline_of(timeout_s);
  std::lock_guard<std::mutex> turn(ranks.kernels().turn);
  return ranks.advance(deadline);
}

bool begin_turn(RankLayer& self, uintptr_t x, int64_t num_x, uintptr_t experts, uintptr_t weights, uintptr_t y,
                int64_t num_tokens, int64_t epoch, int64_t plan_version, int64_t step_id, double timeout_s) {
  const std::string name = self.layer.name();
  check_size(name, "tokens", num_tokens);
  check_size(name, "choices of all tokens", num_tokens * self.layer.num_choices);
  if (num_x != num_tokens * self.layer.width)
    fail(name, "x has " + std::to_string(num_x) + " numbers, " + std::to_string(num_tokens) + " tokens of " +
                   std::to_string(self.layer.width) + " need " + std::to_string(num_tokens * self.layer.width));
  if (num_tokens > 0 && (x == 0 || experts == 0 || weights == 0 || y == 0))
    fail(name, "a tensor of " + std::to_string(num_tokens) + " tokens has no storage");
  const Clock::time_point deadline = deadline_of(timeout_s);
  Kernels& kernels = self.ranks.kernels();
  kernels.team.check();
  self.ranks.check(self.layer, self.slots, num_tokens);
  const uint8_t* of_x = reinterpret_cast<const uint8_t*>(x);
  Added added{};
  int64_t* of_experts = reinterpret_cast<int64_t*>(experts);
  float* of_weights = reinterpret_cast<float*>(weights);
  if (self.router != nullptr) {
    added.rows[1] = of_x;
    of_x = self.ranks.route(*self.router, of_x, num_tokens, of_experts, of_weights);
  }
  self.ranks.begin({&self.layer, &self.slots, of_x, of_experts, of_weights, reinterpret_cast<uint8_t*>(y), num_tokens,
                    self.first, epoch, plan_version, step_id, added});
  if (self.shared != nullptr) self.ranks.share(*self.shared);
  std::lock_guard<std::mutex> turn(kernels.turn);
  return self.ranks.advance(deadline);
}

void bind_moe_ranks(nb::module_& module) {
  nb::class_<SlotTable>(module, "SlotTable")
      .def("__init__", make_table, nb::arg("num_experts"), nb::arg("slots"), nb::arg("rank_of"), nb::arg("num_ranks"));
  nb::class_<MoeRanks>(module, "MoeRanks")
      .def("__init__", make_ranks, nb::arg("kernels"), nb::arg("wire"), nb::arg("lane"), nb::arg("max_choices"),
           nb::arg("sent"), nb::arg("returned"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("advance", advance_turn, nb::call_guard<nb::gil_scoped_release>(), nb::arg("timeout_s"))
      .def("late", [](const MoeRanks& self) {
        const MoeRanks::Late late = self.late();
        return std::make_tuple(late.rank, std::string(late.stage));
      })
      .def("counts", [](const MoeRanks& self) {
        return std::make_tuple(self.num_launches, self.num_jobs, self.weight_bytes, self.send_ns, self.wait_ns);
      });
  nb::class_<RankLayer>(module, "RankLayer")
      .def("__init__", make_layer, nb::arg("ranks"), nb::arg("router").none(), nb::arg("shared").none(),
           nb::arg("layer"), nb::arg("slots"), nb::arg("first"), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("begin", begin_turn, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("num_x"),
           nb::arg("experts"), nb::arg("weights"), nb::arg("y"), nb::arg("num_tokens"), nb::arg("epoch"),
           nb::arg("plan_version"), nb::arg("step_id"), nb::arg("timeout_s"));
}

}  // namespace moesaic
