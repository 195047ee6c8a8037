// Attention and writes to a KV pool: see attention.hpp.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.hpp"
#include "doors.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int64_t kMostRows = 60;           // of a tile: whole register tiles, keys and values reused that often
constexpr int64_t kTileFloats = 12 * 1024;  // guess: values of a tile's rows, which stay in a cache beside the block
constexpr int64_t kSplitPositions = 256;    // guess: a row that sees more may be split over threads by lanes
constexpr int64_t kTasksOfThread = 8;       // guess: of equal work, so that none waits long for the last
constexpr int64_t kSmallWork = 128 * 1024;  // guess: products that one thread has done before another wakes
constexpr int64_t kWrittenNumbers = 32 * 1024;  // guess: of a task that writes to a pool, some 10 us

// One sequence of a step: tokens [first_token, first_token + num_tokens) at positions from start_idx on, with the ids
// of its blocks at `first_block` of all tables.
struct Row {
  int64_t first_token, num_tokens, start_idx, first_block, num_blocks;
};

// A tile and the tasks that compute it: one for all lanes, or one a lane, of which the last to end joins their nodes.
struct Piece {
  AttentionTile tile;
  int64_t first_task, num_tasks;
  size_t first_node;  // in floats
};

// One call and the memory of all calls of a thread.
struct Attending {
  const LevelTable* table = nullptr;
  const Attention* call = nullptr;
  float* nodes = nullptr;
  size_t num_node_floats = 0;
  std::vector<Piece> pieces;
  std::vector<int32_t> piece_of_task;
  std::vector<char> is_there;                    // by task
  std::vector<std::atomic<int64_t>> tasks_left;  // by piece; it only grows by being replaced

  void start(const LevelTable* of_level, const Attention& of_step) {
    table = of_level;
    call = &of_step;
    num_node_floats = 0;
    pieces.clear();
    piece_of_task.clear();
  }

  void add(const AttentionTile& tile, int64_t num_tasks) {
    pieces.push_back({tile, num_all_tasks(), num_tasks, num_node_floats});
    piece_of_task.insert(piece_of_task.end(), static_cast<size_t>(num_tasks), static_cast<int32_t>(pieces.size() - 1));
    if (num_tasks > 1) num_node_floats += static_cast<size_t>(num_tasks) * table->node_floats(*call, tile);
  }

  int64_t num_all_tasks() const { return static_cast<int64_t>(piece_of_task.size()); }

  // After the last piece.
  void make_room(Kernels& kernels) {
    nodes = kernels.scratch_of(num_node_floats);
    is_there.resize(piece_of_task.size());
    if (tasks_left.size() < pieces.size()) tasks_left = std::vector<std::atomic<int64_t>>(pieces.size());
    for (size_t i = 0; i < pieces.size(); ++i) tasks_left[i].store(pieces[i].num_tasks);
  }
};

[[noreturn]] void fail(const std::string& what) { throw std::invalid_argument("attention: " + what); }

std::string text(int64_t number) { return std::to_string(number); }

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    fail(std::string(name) + " must be in " + text(least) + " to " + text(most) + ", got " + text(value));
}

bool is_power_of_two(int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

KvKind pool_kind(int64_t kind) {
  check_range("the pool's kind", kind, 0, 3);
  return static_cast<KvKind>(kind);
}

// Blocks of a pool of `num_bytes`, which must be whole.
int64_t blocks_of(const char* name, int64_t num_bytes, int64_t block_bytes) {
  if (num_bytes < 0 || num_bytes % block_bytes != 0)
    fail(std::string(name) + " has " + text(num_bytes) + " bytes, no whole number of blocks of " + text(block_bytes));
  return num_bytes / block_bytes;
}

void check(const Attention& call, int64_t num_tokens) {
  check_range("tokens", num_tokens, 0, INT32_MAX);
  check_range("heads", call.heads, 1, 1 << 16);
  check_range("groups", call.groups, 1, call.heads);
  if (call.heads % call.groups != 0)
    fail(text(call.groups) + " groups do not divide " + text(call.heads) + " heads");
  check_range("the key width", call.key_width, 1, 1 << 14);
  check_range("the value row's width", call.value_row_width, 1, 1 << 14);
  check_range("the value width", call.value_width, 1, call.value_row_width);
  check_range("kv_block", call.kv_block, 1, 1 << 12);
  check_range("kv_lanes", call.lanes, 1, kMaxLanes);
  if (!is_power_of_two(call.kv_block) || !is_power_of_two(call.lanes))
    fail("kv_block and kv_lanes must be powers of two, got " + text(call.kv_block) + " and " + text(call.lanes));
  check_range("the window", call.window, 0, INT32_MAX);
  if (num_tokens > 0 && (call.q == nullptr || call.y == nullptr || call.keys == nullptr || call.values == nullptr))
    fail("a tensor has no storage");
}

void check_numbers(const Attention& call, int64_t num_tokens, int64_t q_numbers, int64_t y_numbers) {
  const int64_t rows = num_tokens * call.heads;
  if (q_numbers != rows * call.key_width)
    fail("queries have " + text(q_numbers) + " numbers, [" + text(num_tokens) + ", " + text(call.heads) + ", " +
         text(call.key_width) + "] needs " + text(rows * call.key_width));
  if (y_numbers != rows * call.value_width)
    fail("the result has " + text(y_numbers) + " numbers, [" + text(num_tokens) + ", " + text(call.heads) + ", " +
         text(call.value_width) + "] needs " + text(rows * call.value_width));
}

// The blocks that a sequence's tokens see must be there.
void check_row(const Attention& call, const Row& row, int64_t next_token, int64_t num_tokens, int64_t num_ids,
               const int32_t* tables, int64_t num_blocks) {
  if (row.first_token != next_token || row.num_tokens < 1 || row.num_tokens > num_tokens - next_token)
    fail("a sequence of tokens " + text(row.first_token) + " + " + text(row.num_tokens) + " does not follow token " +
         text(next_token) + " of " + text(num_tokens));
  check_range("a position", row.start_idx, 0, INT32_MAX - row.num_tokens);
  const int64_t end = (row.start_idx + row.num_tokens - 1) / call.kv_block + 1;
  if (row.num_blocks < end || row.first_block < 0 || row.num_blocks > num_ids - row.first_block)
    fail("a sequence up to position " + text(row.start_idx + row.num_tokens - 1) + " needs " + text(end) +
         " blocks, its table has " + text(row.num_blocks) + " of " + text(num_ids) + " from " + text(row.first_block));
  for (int64_t i = call.oldest(row.start_idx) / call.kv_block; i < end; ++i) {
    const int32_t block = tables[row.first_block + i];
    if (block < 0 || block >= num_blocks)
      fail("block " + text(i) + " of a sequence is " + text(block) + ", the pool has " + text(num_blocks));
  }
}

// A row in tiles, in pieces of about `share` products; 0: one thread does all. Groups lie side by side in a block, so
// that a tile of few rows takes several. Bits are the same for every cut.
void cut(Attending& run, const Row& row, const int32_t* tables, int64_t share) {
  const Attention& call = *run.call;
  const int64_t most = std::max<int64_t>(6, std::min(kMostRows, kTileFloats / call.value_width));
  const int64_t shared = call.heads_per_group(), heads = std::min(shared, most), positions = most / heads;
  for (int64_t at = 0; at < row.num_tokens; at += positions)
    for (int64_t head = 0; head < shared; head += heads) {
      AttentionTile tile{row.first_token + at, row.start_idx + at, std::min(positions, row.num_tokens - at), head,
                         std::min(heads, shared - head), 0, 0, tables + row.first_block};
      const int64_t seen = tile.first_position + tile.positions - call.oldest(tile.first_position);
      int64_t work = tile.rows() * seen * (call.key_width + call.value_width);  // of a group
      int64_t groups = std::clamp<int64_t>(kTileFloats / (tile.rows() * call.value_width), 1, call.groups);
      const bool is_split = share > 0 && call.lanes > 1 && seen > kSplitPositions && work * groups > 2 * share;
      if (is_split) work /= call.lanes;
      if (share > 0) groups = std::clamp<int64_t>(share / work, 1, groups);
      for (; tile.first_group < call.groups; tile.first_group += groups) {
        tile.groups = std::min(groups, call.groups - tile.first_group);
        run.add(tile, is_split ? call.lanes : 1);
      }
    }
}

float* floats_of_thread(size_t count) {
  thread_local std::vector<float> floats;
  if (floats.size() < count) floats.resize(count);
  return floats.data();
}

int64_t depth_of(int64_t lanes) {
  int64_t depth = 1;
  for (; lanes > 1; lanes /= 2) ++depth;
  return depth;
}

void attend_task(void* context, int64_t task) {
  Attending& run = *static_cast<Attending*>(context);
  const Attention& call = *run.call;
  const int32_t at = run.piece_of_task[task];
  const Piece& piece = run.pieces[at];
  const size_t scratch = run.table->attention_scratch_floats(call, piece.tile);
  const size_t node = run.table->node_floats(call, piece.tile);
  if (piece.num_tasks == 1) {
    float* floats = floats_of_thread(scratch + node * static_cast<size_t>(depth_of(call.lanes)));
    return run.table->attend(call, piece.tile, floats, floats + scratch);
  }
  const int64_t lane = task - piece.first_task;
  float* nodes = run.nodes + piece.first_node;
  run.is_there[task] = run.table->attend_lane(call, piece.tile, lane, floats_of_thread(scratch),
                                              nodes + node * static_cast<size_t>(lane));
  if (run.tasks_left[at].fetch_sub(1) > 1) return;
  bool is_there[kMaxLanes];
  for (int64_t i = 0; i < call.lanes; ++i) is_there[i] = run.is_there[piece.first_task + i] != 0;
  run.table->attend_join(call, piece.tile, nodes, is_there);
}

struct WriteJob {
  const LevelTable* table;
  const KvWrite* call;
  int64_t size;
};

void write_task(void* context, int64_t task) {
  const WriteJob& job = *static_cast<WriteJob*>(context);
  job.table->write_kv(*job.call, task * job.size, std::min((task + 1) * job.size, job.call->tokens),
                      floats_of_thread(static_cast<size_t>(job.call->width)));
}

// Over threads, or at once where waking them costs more.
void run(Kernels& kernels, bool is_small, int64_t num_tasks, Team::Task task, void* job) {
  if (!is_small) return kernels.team.run(num_tasks, task, job);
  for (int64_t i = 0; i < num_tasks; ++i) task(job, i);
}

void attention(Kernels& kernels, uintptr_t q, int64_t q_numbers, uintptr_t keys, int64_t key_bytes, uintptr_t values,
               int64_t value_bytes, uintptr_t y, int64_t y_numbers, uintptr_t sinks, uintptr_t rows, int64_t num_rows,
               uintptr_t tables, int64_t num_ids, int64_t num_tokens, int64_t heads, int64_t groups, int64_t key_width,
               int64_t value_width, int64_t value_row_width, int64_t kv_block, int64_t kv_lanes, int64_t window,
               bool is_chunked, float scale, bool is_bfloat16, int64_t kind) {
  const Attention call{reinterpret_cast<const void*>(q),
                       reinterpret_cast<const uint8_t*>(keys),
                       reinterpret_cast<const uint8_t*>(values),
                       reinterpret_cast<const float*>(sinks),
                       reinterpret_cast<void*>(y),
                       heads, groups, key_width, value_width, value_row_width, kv_block, kv_lanes, window,
                       is_chunked, scale, is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32, pool_kind(kind)};
  check(call, num_tokens);
  check_numbers(call, num_tokens, q_numbers, y_numbers);
  run_attention(kernels, call, key_bytes, value_bytes, {rows, num_rows, tables, num_ids, num_tokens, 0, 0});
}

void write_kv(Kernels& kernels, uintptr_t x, int64_t x_numbers, uintptr_t pool, int64_t pool_bytes, uintptr_t slots,
              int64_t num_tokens, uintptr_t fresh, int64_t num_fresh, int64_t groups, int64_t width, int64_t kv_block,
              bool is_bfloat16, int64_t kind) {
  const KvWrite call{reinterpret_cast<const void*>(x),
                     reinterpret_cast<uint8_t*>(pool),
                     reinterpret_cast<const int64_t*>(slots),
                     num_tokens, groups, width, kv_block,
                     is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32, pool_kind(kind)};
  check_range("tokens", num_tokens, 0, INT32_MAX);
  check_range("groups", groups, 1, 1 << 16);
  check_range("the width", width, 1, 1 << 14);
  check_range("kv_block", kv_block, 1, 1 << 12);
  if (x_numbers != num_tokens * groups * width)
    fail("new rows have " + text(x_numbers) + " numbers, [" + text(num_tokens) + ", " + text(groups) + ", " +
         text(width) + "] needs " + text(num_tokens * groups * width));
  run_kv_write(kernels, call, pool_bytes, {0, 0, 0, 0, num_tokens, fresh, num_fresh});
}

}  // namespace

void run_attention(Kernels& kernels, const Attention& call, int64_t key_bytes, int64_t value_bytes,
                   const KvStep& step) {
  const int64_t num_tokens = step.num_tokens, groups = call.groups;
  check_range("sequences", step.num_rows, 0, num_tokens);
  check_range("block ids", step.num_ids, 0, INT32_MAX);
  if (num_tokens == 0) return;
  const Row* all = reinterpret_cast<const Row*>(step.rows);
  const int32_t* ids = reinterpret_cast<const int32_t*>(step.ids);
  if (all == nullptr || ids == nullptr) fail("a table has no storage");
  const int64_t in_block = groups * call.kv_block;
  const int64_t num_blocks = std::min(blocks_of("the key pool", key_bytes, in_block * call.key_bytes()),
                                      blocks_of("the value pool", value_bytes, in_block * call.value_bytes()));
  int64_t next_token = 0, work = 0;
  for (int64_t i = 0; i < step.num_rows; ++i) {
    check_row(call, all[i], next_token, num_tokens, step.num_ids, ids, num_blocks);
    next_token += all[i].num_tokens;
    const int64_t seen = all[i].start_idx + all[i].num_tokens - call.oldest(all[i].start_idx);
    work += all[i].num_tokens * call.heads * seen * (call.key_width + call.value_width);
  }
  if (next_token != num_tokens) fail(text(num_tokens) + " tokens, sequences of " + text(next_token) + " in all");
  std::lock_guard<std::mutex> turn(kernels.turn);
  const int64_t num_threads = kernels.team.num_threads();
  const bool is_small = work < kSmallWork || num_threads == 1;
  thread_local Attending of_thread;
  of_thread.start(kernels.table, call);
  for (int64_t i = 0; i < step.num_rows; ++i)
    cut(of_thread, all[i], ids, is_small ? 0 : work / (kTasksOfThread * num_threads));
  of_thread.make_room(kernels);
  run(kernels, is_small, of_thread.num_all_tasks(), attend_task, &of_thread);
}

void run_kv_write(Kernels& kernels, const KvWrite& call, int64_t pool_bytes, const KvStep& step) {
  check_range("fresh blocks", step.num_fresh, 0, call.tokens);
  const int64_t block_bytes = call.groups * call.kv_block * kv_row_bytes(call.pool_kind, call.width);
  const int64_t num_blocks = blocks_of("the pool", pool_bytes, block_bytes);
  if (call.tokens == 0) return;
  const int64_t* cleared = reinterpret_cast<const int64_t*>(step.fresh);
  if (call.x == nullptr || call.pool == nullptr || call.slots == nullptr || (step.num_fresh > 0 && cleared == nullptr))
    fail("a tensor has no storage");
  for (int64_t i = 0; i < call.tokens; ++i) check_range("a slot", call.slots[i], 0, num_blocks * call.kv_block - 1);
  for (int64_t i = 0; i < step.num_fresh; ++i) check_range("a fresh block", cleared[i], 0, num_blocks - 1);
  for (int64_t i = 0; i < step.num_fresh; ++i)
    std::memset(call.pool + cleared[i] * block_bytes, 0, static_cast<size_t>(block_bytes));
  std::lock_guard<std::mutex> turn(kernels.turn);
  WriteJob job{kernels.table, &call, std::max<int64_t>(1, kWrittenNumbers / (call.groups * call.width))};
  run(kernels, call.tokens < 2 * job.size, (call.tokens + job.size - 1) / job.size, write_task, &job);
}

void bind_attention(nb::class_<Kernels>& kernels) {
  kernels
      .def("attention", attention, nb::call_guard<nb::gil_scoped_release>(), nb::arg("q"), nb::arg("q_numbers"),
           nb::arg("keys"), nb::arg("key_bytes"), nb::arg("values"), nb::arg("value_bytes"), nb::arg("y"),
           nb::arg("y_numbers"), nb::arg("sinks"), nb::arg("rows"), nb::arg("num_rows"), nb::arg("tables"),
           nb::arg("num_ids"), nb::arg("num_tokens"), nb::arg("heads"), nb::arg("groups"), nb::arg("key_width"),
           nb::arg("value_width"), nb::arg("value_row_width"), nb::arg("kv_block"), nb::arg("kv_lanes"),
           nb::arg("window"), nb::arg("is_chunked"), nb::arg("scale"), nb::arg("is_bfloat16"), nb::arg("kind"))
      .def("write_kv", write_kv, nb::call_guard<nb::gil_scoped_release>(), nb::arg("x"), nb::arg("x_numbers"),
           nb::arg("pool"), nb::arg("pool_bytes"), nb::arg("slots"), nb::arg("num_tokens"), nb::arg("fresh"),
           nb::arg("num_fresh"), nb::arg("groups"), nb::arg("width"), nb::arg("kv_block"), nb::arg("is_bfloat16"),
           nb::arg("kind"));
}

}  // namespace moesaic
