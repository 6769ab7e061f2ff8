#include "ngram_index.h"

#include <algorithm>
#include <stdexcept>

namespace tokenmill {
namespace {

constexpr std::size_t kFewest = 256;

std::uint32_t hash_of(const std::int32_t* tokens, std::int64_t end, int count) {
  std::uint64_t hash = 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(count);
  for (std::int64_t i = end - count; i < end; ++i) {
    hash = (hash ^ static_cast<std::uint32_t>(tokens[i])) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return static_cast<std::uint32_t>(hash);
}

}  // namespace

void NgramTable::clear() {
  entries_.clear();
  counts_.clear();
  num_taken_ = 0;
  num_indexed_ = 0;
}

void NgramTable::extend(const std::int32_t* tokens, std::int64_t end, int shortest, int longest) {
  for (std::int64_t last = num_indexed_ + 1; last <= end; ++last) {
    const int most = static_cast<int>(std::min<std::int64_t>(longest, last));
    for (int count = shortest; count <= most; ++count) {
      if (entries_.size() <= 2 * num_taken_) grow();
      const std::uint32_t hash = hash_of(tokens, last, count);
      const std::size_t place = place_of(tokens, last, count, hash);
      if (entries_[place].end == 0) ++num_taken_;
      entries_[place] = {hash, static_cast<std::int32_t>(last)};
      counts_[place] = static_cast<std::uint8_t>(count);
    }
  }
  num_indexed_ = std::max(num_indexed_, end);
}

std::int64_t NgramTable::find(const std::int32_t* tokens, std::int64_t num_tokens,
                              int count) const {
  if (entries_.empty() || count > num_tokens) return 0;
  const std::uint32_t hash = hash_of(tokens, num_tokens, count);
  return entries_[place_of(tokens, num_tokens, count, hash)].end;
}

// The entry of a run that ends in front of token `end`, or the free place where it belongs.
std::size_t NgramTable::place_of(const std::int32_t* tokens, std::int64_t end, int count,
                                 std::uint32_t hash) const {
  const std::size_t mask = entries_.size() - 1;
  for (std::size_t place = hash & mask;; place = (place + 1) & mask) {
    const Entry& entry = entries_[place];
    if (entry.end == 0) return place;
    if (entry.hash == hash && counts_[place] == count &&
        std::equal(tokens + end - count, tokens + end, tokens + entry.end - count))
      return place;
  }
}

void NgramTable::grow() {
  std::vector<Entry> entries(std::max(kFewest, 2 * entries_.size()));
  std::vector<std::uint8_t> counts(entries.size());
  const std::size_t mask = entries.size() - 1;
  for (std::size_t from = 0; from < entries_.size(); ++from) {
    if (entries_[from].end == 0) continue;
    std::size_t place = entries_[from].hash & mask;
    while (entries[place].end != 0) place = (place + 1) & mask;
    entries[place] = entries_[from];
    counts[place] = counts_[from];
  }
  entries_.swap(entries);
  counts_.swap(counts);
}

NgramIndex::NgramIndex(std::int64_t num_rows, int shortest, int longest)
    : shortest_(shortest), longest_(longest) {
  if (num_rows < 1 || shortest < 1 || longest < shortest || longest > 255)
    throw std::invalid_argument("n-grams: 1 <= shortest <= longest <= 255, and some rows");
  rows_.resize(static_cast<std::size_t>(num_rows));
}

void NgramIndex::propose(std::int64_t row, std::int64_t generation, const std::int32_t* tokens,
                         std::int64_t num_tokens, int max_drafts,
                         std::vector<std::int32_t>& drafts, int& matched) {
  if (row < 0 || row >= static_cast<std::int64_t>(rows_.size()))
    throw std::invalid_argument("n-grams: no such row");
  Row& own = rows_[static_cast<std::size_t>(row)];
  if (own.generation != generation) {
    own.generation = generation;
    own.table.clear();
  }
  drafts.clear();
  matched = 0;
  own.table.extend(tokens, num_tokens - 1, shortest_, longest_);
  std::int64_t from = 0;
  for (int count = longest_; count >= shortest_ && from == 0; --count) {
    from = own.table.find(tokens, num_tokens, count);
    matched = from ? count : 0;
  }
  if (from == 0) return;
  for (std::int64_t i = from; static_cast<int>(drafts.size()) < max_drafts; ++i)
    drafts.push_back(i < num_tokens ? tokens[i] : drafts[static_cast<std::size_t>(i - num_tokens)]);
}

}  // namespace tokenmill
