// What most often followed the last few tokens, in all requests so far: what drafts by suffix are
// made of (kernels/suffix_index.py has the same in Python).
#pragma once

#include <cstdint>
#include <vector>

namespace tokenmill {

// A table of fixed size. A context, a few tokens in a row, has one place in it, which keeps the
// token that mostly followed and how often; contexts that fall on the same place wear each other
// out, so that old ones give way.
class ContextTable {
 public:
  // `num_places` is a power of two.
  explicit ContextTable(std::size_t num_places) : entries_(num_places) {}

  // `token_id` has followed a context.
  void observe(std::uint64_t context, std::int32_t token_id);
  // What follows, and how likely that is; false if the context is not known.
  bool predict(std::uint64_t context, std::int32_t* token_id, double* probability) const;

 private:
  struct Entry {
    std::uint32_t tag = 0;
    std::int32_t token_id = 0;
    std::uint16_t num_right = 0, num_seen = 0;
  };

  std::size_t place_of(std::uint64_t context) const { return context & (entries_.size() - 1); }

  std::vector<Entry> entries_;
};

// Of all rows of the workers' tables, over one table of contexts.
class SuffixIndex {
 public:
  // Contexts of 1 <= shortest <= longest tokens; drafts end where they are less likely than
  // `least_probability`, all of them together.
  SuffixIndex(std::int64_t num_rows, int shortest, int longest, std::int64_t num_places,
              double least_probability);

  // Drafts behind the tokens of a row, at most `max_drafts`; new tokens of the row are taken in
  // first. `matched` is the length of the context of the first draft. Requests with different salts
  // learn nothing from each other. Tokens of the same generation never change.
  void propose(std::int64_t row, std::int64_t generation, std::uint64_t salt,
               const std::int32_t* tokens, std::int64_t num_tokens, int max_drafts,
               std::vector<std::int32_t>& drafts, int& matched);

 private:
  struct Row {
    std::int64_t generation = -1;
    std::int64_t num_indexed = 0;
  };

  void take_in(Row& row, std::uint64_t salt, const std::int32_t* tokens, std::int64_t num_tokens);

  int shortest_, longest_;
  double least_probability_;
  ContextTable contexts_;
  std::vector<Row> rows_;
};

}  // namespace tokenmill
