// The routed experts of a layer over all ranks of a machine, in one call on each of them:
//
//   rank s, its tokens                                    rank d, its experts
//     head | jobs | rows  --> inbox of d -- arrives -->     slot by slot: all jobs that are here, in tiles of columns
//     results, flags      <-- written where s asked <--     a row for each job
//     combine: a block of tokens whose choices are all there
//
// Nobody waits for all: a slot is opened with the jobs that have arrived, a rank's own among the first, and once more
// for those that come later. A message is 32 bytes of head, 16 for each job, sorted by (slot, token), and a row for each
// token. Returns of a rank are a turn for each (token, choice), stored last (release), and then its rows.
//
// A call may begin with norm and router and end with shared expert and residual: then it is the sparse half of the layer.
//
// Time that a call takes is sending, waiting, or computing. Sending is to sort the jobs and to write rows and results for
// others; results are sent by one thread while others work, and count by its share of the threads. A rank waits while
// none of its threads has anything to do.
//
// Who begins turn q + 1 has seen the messages of turn q of all others, so each has ended turn q - 1: two inboxes a pair
// are enough, and returns, which are written for whoever has begun, need one place.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "moe_layer.hpp"
#include "wire.hpp"

namespace moesaic {

// Which slot takes a token of an expert, and whose it is.
struct SlotTable {
  int64_t num_experts, num_variants;
  std::vector<int64_t> slots;        // [E, V]: token number t goes to slot t mod V
  std::vector<int64_t> place;        // of a slot when they stand rank after rank
  std::vector<int64_t> first_place;  // of a rank; and the end
};

struct RankJob {
  int32_t row, slot, choice;  // of the message; of the receiver; t * K + k of the sender
  float weight;
};

struct RankHead {
  int32_t epoch, plan_version, step_id, layer_idx, num_rows, num_jobs, spare[2];
};
static_assert(sizeof(RankJob) == 16 && sizeof(RankHead) == 32, "what the sizes of inboxes are computed from");

// One layer on one rank, of one turn.
struct RankCall {
  const MoeLayer* layer;
  const SlotTable* slots;
  const uint8_t* x;         // [T, D] of the seam's kind
  const int64_t* experts;   // [T, K]
  const float* weights;     // [T, K]
  uint8_t* y;               // [T, D]
  int64_t num_tokens, first;  // number of the first token, for the choice of copies
  int64_t epoch, plan_version, step_id;
  Added added;
};

// All calls of one lane on one rank, one after the other. A call may be broken off at any time and taken up again.
class MoeRanks {
 public:
  // `sent` and `returned` are counters of bytes by rank, of the caller.
  MoeRanks(Kernels& kernels, const Wire& wire, int64_t lane, int64_t max_choices, int64_t* sent, int64_t* returned);

  // Throws where a turn of so many tokens cannot begin.
  void check(const MoeLayer& layer, const SlotTable& slots, int64_t num_tokens) const;
  // Rows normed, for the turn that begins next, and what each chooses.
  const uint8_t* route(const RouterLayer& router, const void* x, int64_t num_tokens, int64_t* experts, float* weights);
  // Sends the rows and begins a turn that was checked.
  void begin(const RankCall& call);
  // The shared expert of the rows, while they are away.
  void share(const SharedLayer& shared);
  // Whether the turn is over; else nothing can be done before `deadline`.
  bool advance(Clock::time_point deadline);
  Kernels& kernels() const { return kernels_; }

  struct Late {
    int rank;
    const char* stage;
  };
  Late late() const;

  int64_t num_launches = 0, num_jobs = 0, weight_bytes = 0, send_ns = 0, wait_ns = 0;  // of all turns

 private:
  // What a rank sent.
  struct Source {
    bool is_here;
    const uint8_t* rows;
    const RankJob* jobs;
    std::vector<int32_t> first;  // job of each slot, and the end
    std::vector<uint8_t> is_opened;
  };
  enum class State { kFree, kFilling, kOpen };
  // The jobs of one slot that are computed together.
  struct Group {
    State state = State::kFree;
    int64_t slot = 0, num_inner = 0, num_tasks = 0, next_task = 0, inner_tile = 0, down_tile = 0;
    std::vector<const RankJob*> jobs;
    std::vector<int> source_of_job;
    std::vector<int32_t> rows_of_jobs;
    int32_t offsets[2] = {0, 0};
    Moe call{};
    Buffer rows, hidden, out;
    std::atomic<int64_t> inner_left{0}, down_left{0};
  };
  struct Block {
    int64_t first, end, seen;  // tokens; choices that were there when last looked at
  };
  enum class Kind { kTask, kFill, kCombine, kNothing, kOver };
  struct Pick {
    Kind kind;
    Group* group;
    int64_t at, end;
  };

  void sort(const RankCall& call);
  void send(int to);
  void take_own();
  void index(Source& source, int64_t num_jobs);
  void look_for_sources();
  bool open(Group& group);
  bool pick_block(Pick& pick);
  Pick next();
  void set_idle(bool& was_idle, bool is_idle);
  void work();
  void combine(int64_t first, int64_t end);
  void fill(Group& group);
  const uint8_t* weights_after(const Group& group, int64_t task) const;
  void run_task(Group& group, int64_t task);
  void finish(Group& group);
  int64_t row_bytes() const { return call_.layer->width * bytes_of(call_.layer->seam); }
  std::atomic<uint64_t>* flags_of(int rank) const;
  uint8_t* results_of(int rank) const;

  Kernels& kernels_;
  const Wire& wire_;
  const int64_t lane_, max_choices_;
  int64_t *sent_, *returned_;
  uint64_t turn_ = 0;  // 1 + that of the call, while one runs
  bool is_over_ = true;
  RankCall call_{};
  Moe combine_{};
  std::vector<int64_t> place_, offsets_;     // of choices; of places
  std::vector<int32_t> order_, row_of_, iota_;
  std::vector<RankJob> own_jobs_;
  std::vector<Source> sources_;
  std::vector<int64_t> pending_;  // by slot: jobs that are here and in no group
  int64_t num_pending_ = 0, cursor_ = 0, num_absent_ = 0;
  std::vector<Group> groups_;
  std::vector<Block> blocks_;  // not taken
  size_t next_block_ = 0;
  Buffer normed_, logits_, shared_;
  int num_busy_ = 0;  // threads with something to do
  Clock::time_point idle_since_;
  std::mutex mutex_;  // what any thread takes next
  Clock::time_point deadline_;
  std::atomic<int> dead_{-1};
  std::string error_;
};

// What does not change from call to call of a layer on a lane; others own it all.
struct RankLayer {
  MoeRanks& ranks;
  const RouterLayer* router;  // null: whoever calls has routed the rows
  const SharedLayer* shared;  // or null
  const MoeLayer& layer;
  const SlotTable& slots;
  int64_t first;
};

// A turn of a layer; whether it was over in time. With a router `experts` and `weights`, [T, K] each, are written, and
// y = x + experts(norm(x)), the shared one among them; else they are read. All but addresses is checked.
bool begin_turn(RankLayer& layer, uintptr_t x, int64_t num_x, uintptr_t experts, uintptr_t weights, uintptr_t y,
                int64_t num_tokens, int64_t epoch, int64_t plan_version, int64_t step_id, double timeout_s);
// Goes on with a turn that was not over.
bool advance_turn(MoeRanks& ranks, double timeout_s);

}  // namespace moesaic
