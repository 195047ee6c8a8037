// Messages over shared memory: see wire.hpp. A message whose inbox is not free yet waits here, and goes when its sender
// looks or waits for anything.
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "doors.hpp"
#include "wire.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

struct Message {
  int64_t lane;
  uint64_t turn;
  int to;
  const uint8_t* data;
  int64_t num_bytes;
};

// One rank's end; one thread at a time.
class Messenger {
 public:
  explicit Messenger(Wire& wire) : wire_(wire) {}

  void put(int64_t lane, uint64_t turn, const std::vector<uintptr_t>& data, const std::vector<int64_t>& sizes) {
    check_lane(lane);
    const size_t num_ranks = static_cast<size_t>(wire_.num_ranks);
    if (data.size() != num_ranks || sizes.size() != num_ranks)
      fail("exchange", std::to_string(num_ranks) + " ranks, " + std::to_string(data.size()) + " messages");
    for (int to = 0; to < wire_.num_ranks; ++to)
      if (to != wire_.rank && (sizes[to] < 0 || sizes[to] > wire_.lane(lane).inbox_bytes))
        fail("exchange on lane " + std::to_string(lane),
             "a message of " + std::to_string(sizes[to]) + " bytes to rank " + std::to_string(to) + ", inboxes have " +
                 std::to_string(wire_.lane(lane).inbox_bytes));
    for (int step = 1; step < wire_.num_ranks; ++step) {  // each rank begins with another one
      const int to = (wire_.rank + step) % wire_.num_ranks;
      const Message message{lane, turn, to, reinterpret_cast<const uint8_t*>(data[to]), sizes[to]};
      if (!deliver(message)) waiting_.push_back(message);
    }
  }

  bool ready(int64_t lane, uint64_t turn) {
    check_lane(lane);
    return missing(lane, turn) < 0;
  }

  // The rank that stayed away; -1: all messages are here and all own ones are delivered.
  int wait(int64_t lane, uint64_t turn, double timeout_s) {
    check_lane(lane);
    const Clock::time_point deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
    RankPatience patience;
    while (true) {
      const uint32_t heard = wire_.heard();
      const int late = missing(lane, turn);
      if (late < 0) return -1;
      if (!patience.wait(wire_, heard, deadline)) return late;
      if (!patience.has_slept) continue;
      const int dead = wire_.find_dead([&](int rank) { return is_missed(lane, turn, rank); });
      if (dead >= 0) return dead;
    }
  }

  // (offset in the memory, bytes) by source, (0, 0) for this rank; frees what the last turn of the lane brought.
  std::vector<std::tuple<int64_t, int64_t>> take(int64_t lane, uint64_t turn) {
    check_lane(lane);
    std::vector<std::tuple<int64_t, int64_t>> found;
    for (int from = 0; from < wire_.num_ranks; ++from) {
      if (from == wire_.rank) {
        found.emplace_back(0, 0);
        continue;
      }
      Head& head = wire_.head(lane, wire_.rank, from, turn);
      if (head.turn.load(std::memory_order_acquire) != turn + 1) fail("exchange", "taken before it was there");
      found.emplace_back(wire_.offset_of(Wire::body(head)), head.num_bytes);
      wire_.taken(lane, wire_.rank, from).store(turn, std::memory_order_release);
      wire_.ring(from);
    }
    return found;
  }

 private:
  void check_lane(int64_t lane) const {
    if (lane < 0 || lane >= wire_.num_lanes())
      fail("exchange", "lane " + std::to_string(lane) + " of " + std::to_string(wire_.num_lanes()));
  }

  bool deliver(const Message& message) {
    // `taken` turns have been read to their end: their inboxes are free.
    if (message.turn >= wire_.taken(message.lane, message.to, wire_.rank).load(std::memory_order_acquire) + kDepth)
      return false;
    Head& head = wire_.head(message.lane, message.to, wire_.rank, message.turn);
    if (message.num_bytes > 0) std::memcpy(Wire::body(head), message.data, static_cast<size_t>(message.num_bytes));
    head.num_bytes = message.num_bytes;
    head.turn.store(message.turn + 1, std::memory_order_release);
    wire_.ring(message.to);
    return true;
  }

  bool is_here(int64_t lane, uint64_t turn, int from) const {
    return wire_.head(lane, wire_.rank, from, turn).turn.load(std::memory_order_acquire) == turn + 1;
  }

  bool is_missed(int64_t lane, uint64_t turn, int rank) const {
    if (!is_here(lane, turn, rank)) return true;
    for (const Message& message : waiting_)
      if (message.lane == lane && message.turn <= turn && message.to == rank) return true;
    return false;
  }

  int missing(int64_t lane, uint64_t turn) {
    if (!waiting_.empty())
      waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(),
                                    [&](const Message& message) { return deliver(message); }),
                     waiting_.end());
    for (int rank = 0; rank < wire_.num_ranks; ++rank)
      if (rank != wire_.rank && is_missed(lane, turn, rank)) return rank;
    return -1;
  }

  Wire& wire_;
  std::vector<Message> waiting_;
};

void make_wire(Wire* self, uintptr_t memory, int64_t num_bytes, int rank, int num_ranks,
               const std::vector<std::tuple<int64_t, int64_t, int64_t>>& lanes, const std::vector<int>& watched) {
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks)
    fail("wire", "rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
  if (memory % kLine != 0) fail("wire", "the memory starts between two lines");
  if (!watched.empty() && watched.size() != static_cast<size_t>(num_ranks))
    fail("wire", "a process to watch for each rank, or for none");
  std::vector<Lane> found;
  int64_t end = num_ranks * kLine;
  for (const auto& [start, inbox_bytes, return_bytes] : lanes) {
    if (start < end || inbox_bytes < 0 || return_bytes < 0 || (start | inbox_bytes | return_bytes) % kLine != 0)
      fail("wire", "a lane overlaps another or is no whole lines");
    end = start + num_ranks * (num_ranks - 1) * (kLine + kDepth * (kLine + inbox_bytes)) + num_ranks * return_bytes;
    found.push_back({start, inbox_bytes, return_bytes});
  }
  if (end > num_bytes)
    fail("wire", "lanes end at " + std::to_string(end) + ", the memory at " + std::to_string(num_bytes));
  new (self) Wire(reinterpret_cast<uint8_t*>(memory), rank, num_ranks, std::move(found), watched);
}

}  // namespace

void bind_wire(nb::module_& module) {
  nb::class_<Wire>(module, "Wire")
      .def("__init__", make_wire, nb::arg("memory"), nb::arg("num_bytes"), nb::arg("rank"), nb::arg("num_ranks"),
           nb::arg("lanes"), nb::arg("watched"));
  nb::class_<Messenger>(module, "Messenger")
      .def("__init__", [](Messenger* self, Wire& wire) { new (self) Messenger(wire); }, nb::arg("wire"),
           nb::keep_alive<1, 2>())
      .def("put", &Messenger::put, nb::arg("lane"), nb::arg("turn"), nb::arg("data"), nb::arg("sizes"))
      .def("ready", &Messenger::ready, nb::arg("lane"), nb::arg("turn"))
      .def("wait", &Messenger::wait, nb::call_guard<nb::gil_scoped_release>(), nb::arg("lane"), nb::arg("turn"),
           nb::arg("timeout_s"))
      .def("take", &Messenger::take, nb::arg("lane"), nb::arg("turn"));
}

}  // namespace moesaic
