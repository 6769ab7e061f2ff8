// Low-rank adapters as a whole: tiles of rows, and the split among threads.
#include "lora.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kTaskRanks = 16;     // each task reads its rows anew, so not too few
constexpr int kTaskRanksAlone = 8;  // of a single tile, which is all that threads can share
constexpr int kTaskPanels = 8;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("adapters: ") + what);
}

// body(task, range) for every tile and part that has an adapter, in ranges of at most `step` of
// `count(tile, part)`; `most` is the largest count of a part.
template <class Count, class Body>
void for_parts(const AdapterCall& call, int most, int step, const Count& count,
               const Body& body) {
  const std::vector<AdapterRows::Tile>& tiles = call.rows->tiles();
  const int num_parts = call.tables->num_parts(), num_ranges = ceil_div(most, step);
  const int per_tile = num_parts * num_ranges;
  parallel_for(static_cast<int>(tiles.size()) * per_tile, [&](int task, int) {
    const AdapterTask work{tiles[task / per_tile], task % per_tile / num_ranges};
    const int rank = call.tables->rank(work.tile.slot, work.part);
    const int begin = task % num_ranges * step, end = count(work.part, rank);
    if (rank > 0 && begin < end) body(work, Range{begin, std::min(begin + step, end)});
  });
}

}  // namespace

AdapterRows::AdapterRows(const std::int32_t* slot_of_row, std::int64_t num_rows, int num_slots)
    : slot_of_row_(slot_of_row), num_rows_(num_rows), num_slots_(num_slots),
      by_slot_(static_cast<std::size_t>(num_slots)) {}

void AdapterRows::clear() {
  tiles_.clear();
  order_.clear();
  num_tokens_ = 0;
}

void AdapterRows::fill(const std::int64_t* rows, const std::int64_t* counts,
                       std::int64_t num_reqs) {
  clear();
  for (std::vector<int>& each : by_slot_) each.clear();
  bool any = false;
  for (std::int64_t i = 0; i < num_reqs; ++i) {
    require(rows[i] >= 0 && rows[i] < num_rows_, "no such row");
    const std::int32_t slot = slot_of_row_[rows[i]];
    require(slot >= kNone && slot < num_slots_, "the adapter of a row is not there");
    if (slot != kNone) {
      any = true;
      for (std::int64_t t = 0; t < counts[i]; ++t)
        by_slot_[slot].push_back(num_tokens_ + static_cast<int>(t));
    }
    num_tokens_ += static_cast<int>(counts[i]);
  }
  if (!any) return;
  for (int slot = 0; slot < num_slots_; ++slot) {
    const std::vector<int>& tokens = by_slot_[slot];
    const int first = static_cast<int>(order_.size()), count = static_cast<int>(tokens.size());
    order_.insert(order_.end(), tokens.begin(), tokens.end());
    for (int at = 0; at < count; at += kTileRows)
      tiles_.push_back({slot, first + at, std::min(kTileRows, count - at)});
  }
}

void add_adapters(const AdapterCall& call, int num_rows) {
  if (call.rows->tiles().empty()) return;
  require(call.rows->num_tokens() <= num_rows, "rows were told for another step");
  const AdapterTables& tables = *call.tables;
  const auto shrink = TOKENMILL_AT_LEVEL(shrink_rows);
  const int task_ranks = call.rows->tiles().size() > 1 ? kTaskRanks : kTaskRanksAlone;
  for_parts(
      call, tables.max_rank, task_ranks, [](int, int rank) { return rank; },
      [&](const AdapterTask& task, Range ranks) { shrink(call, task, ranks); });
  int most_panels = 0;
  for (const AdapterTables::Part& part : tables.parts)
    most_panels = std::max(most_panels, part.num_panels());
  const auto expand = TOKENMILL_AT_LEVEL(expand_rows);
  for_parts(
      call, most_panels, kTaskPanels,
      [&](int part, int) { return tables.parts[part].num_panels(); },
      [&](const AdapterTask& task, Range panels) { expand(call, task, panels); });
}

}  // namespace tokenmill
