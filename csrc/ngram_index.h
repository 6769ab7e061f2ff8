// Where the last tokens of a row stood before: what drafts by prompt lookup are made of
// (kernels/ngram_index.py has the same in Python).
#pragma once

#include <cstdint>
#include <vector>

namespace tokenmill {

// The tokens of one request, by every run of `shortest` to `longest` of them: where its latest
// occurrence ends. Grows with the request, a few lookups a token; of a token's context nothing else
// is ever looked at.
class NgramTable {
 public:
  // Forgets everything.
  void clear();
  // Takes in the runs that end in front of token `end`, those taken in before apart.
  void extend(const std::int32_t* tokens, std::int64_t end, int shortest, int longest);
  // Where the latest occurrence of the last `count` tokens ends; 0 if there is none before them.
  std::int64_t find(const std::int32_t* tokens, std::int64_t num_tokens, int count) const;

 private:
  struct Entry {
    std::uint32_t hash = 0;
    std::int32_t end = 0;  // 0 is a free place
  };

  std::size_t place_of(const std::int32_t* tokens, std::int64_t end, int count,
                       std::uint32_t hash) const;
  void grow();

  std::vector<Entry> entries_;  // a power of two of them, at most half of them taken
  std::vector<std::uint8_t> counts_;  // how long each entry's run is
  std::size_t num_taken_ = 0;
  std::int64_t num_indexed_ = 0;
};

// Of all rows of the workers' tables.
class NgramIndex {
 public:
  // Runs of 1 <= shortest <= longest tokens.
  NgramIndex(std::int64_t num_rows, int shortest, int longest);

  // Drafts behind the tokens of a row: what followed the longest of its last runs that has occurred
  // before, at most `max_drafts` tokens; none if there is no such run. What follows beyond the last
  // token are the drafts themselves. `matched` is the length of the run.
  //
  // Tokens of the same generation never change; another one is another request.
  void propose(std::int64_t row, std::int64_t generation, const std::int32_t* tokens,
               std::int64_t num_tokens, int max_drafts, std::vector<std::int32_t>& drafts,
               int& matched);

 private:
  struct Row {
    std::int64_t generation = -1;
    NgramTable table;
  };

  int shortest_, longest_;
  std::vector<Row> rows_;
};

}  // namespace tokenmill
