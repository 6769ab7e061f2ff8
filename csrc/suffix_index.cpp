#include "suffix_index.h"

#include <algorithm>
#include <stdexcept>

namespace tokenmill {
namespace {

// Of the `count` tokens in front of `end`.
std::uint64_t context_of(std::uint64_t salt, const std::int32_t* end, int count) {
  std::uint64_t hash = salt * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(count);
  hash *= 0xff51afd7ed558ccdu;
  hash ^= hash >> 32;
  for (const std::int32_t* token = end - count; token < end; ++token) {
    hash = (hash ^ static_cast<std::uint32_t>(*token)) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

std::uint32_t tag_of(std::uint64_t context) { return static_cast<std::uint32_t>(context >> 32); }

}  // namespace

void ContextTable::observe(std::uint64_t context, std::int32_t token_id) {
  Entry& entry = entries_[place_of(context)];
  if (entry.tag != tag_of(context) || entry.num_seen == 0) {
    if (entry.num_seen > 1) {
      entry.num_seen /= 2;
      entry.num_right /= 2;
    } else {
      entry = {tag_of(context), token_id, 1, 1};
    }
    return;
  }
  if (entry.num_seen == 65535) {
    entry.num_seen /= 2;
    entry.num_right /= 2;
  }
  ++entry.num_seen;
  if (entry.token_id == token_id) {
    ++entry.num_right;
  } else if (entry.num_right > 1) {
    --entry.num_right;
  } else {
    entry.token_id = token_id;
    entry.num_right = 1;
  }
}

bool ContextTable::predict(std::uint64_t context, std::int32_t* token_id,
                           double* probability) const {
  const Entry& entry = entries_[place_of(context)];
  if (entry.num_seen == 0 || entry.tag != tag_of(context)) return false;
  *token_id = entry.token_id;
  *probability = static_cast<double>(entry.num_right) / (entry.num_seen + 1.0);
  return true;
}

SuffixIndex::SuffixIndex(std::int64_t num_rows, int shortest, int longest,
                         std::int64_t num_places, double least_probability)
    : shortest_(shortest), longest_(longest), least_probability_(least_probability),
      contexts_(static_cast<std::size_t>(std::max<std::int64_t>(num_places, 1))) {
  if (num_rows < 1 || shortest < 1 || longest < shortest || longest > 255)
    throw std::invalid_argument("suffixes: 1 <= shortest <= longest <= 255, and some rows");
  if (num_places < 1 || (num_places & (num_places - 1)) != 0)
    throw std::invalid_argument("suffixes: a power of two places");
  rows_.resize(static_cast<std::size_t>(num_rows));
}

void SuffixIndex::take_in(Row& row, std::uint64_t salt, const std::int32_t* tokens,
                          std::int64_t num_tokens) {
  for (std::int64_t next = std::max<std::int64_t>(row.num_indexed, shortest_); next < num_tokens;
       ++next) {
    const int most = static_cast<int>(std::min<std::int64_t>(longest_, next));
    for (int count = shortest_; count <= most; ++count)
      contexts_.observe(context_of(salt, tokens + next, count), tokens[next]);
  }
  row.num_indexed = std::max(row.num_indexed, num_tokens);
}

void SuffixIndex::propose(std::int64_t row, std::int64_t generation, std::uint64_t salt,
                          const std::int32_t* tokens, std::int64_t num_tokens, int max_drafts,
                          std::vector<std::int32_t>& drafts, int& matched) {
  if (row < 0 || row >= static_cast<std::int64_t>(rows_.size()))
    throw std::invalid_argument("suffixes: no such row");
  Row& own = rows_[static_cast<std::size_t>(row)];
  if (own.generation != generation) own = {generation, 0};
  take_in(own, salt, tokens, num_tokens);
  drafts.clear();
  matched = 0;
  const std::int64_t kept = std::min<std::int64_t>(longest_, num_tokens);
  std::vector<std::int32_t> text(tokens + num_tokens - kept, tokens + num_tokens);
  double likely = 1.0;
  while (static_cast<int>(drafts.size()) < max_drafts) {
    std::int32_t token_id = 0;
    double probability = 0.0;
    int count = static_cast<int>(std::min<std::size_t>(longest_, text.size()));
    const std::int32_t* end = text.data() + text.size();
    while (count >= shortest_ &&
           !contexts_.predict(context_of(salt, end, count), &token_id, &probability))
      --count;
    likely *= probability;
    if (count < shortest_ || likely < least_probability_) return;
    if (drafts.empty()) matched = count;
    drafts.push_back(token_id);
    text.push_back(token_id);
  }
}

}  // namespace tokenmill
