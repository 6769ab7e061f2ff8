// A recorded step: kernel calls on fixed buffers with one open number, the rows of the step.
//
// While a program records, the bindings hand their calls to it instead of making them. Recorded at
// the largest number of rows, it serves every smaller one: rows come first in each buffer.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

namespace tokenmill {

class Program {
 public:
  using Call = std::function<void(int num_rows)>;

  explicit Program(int max_rows);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Between these, calls made on this thread are recorded. One program records at a time.
  void begin();
  void end();

  // Throws std::invalid_argument for a call of another number of rows than the program's largest.
  void append(std::int64_t num_rows, Call call);

  // Makes all calls, for 1 to max_rows rows.
  void replay(int num_rows) const;

  int num_calls() const { return static_cast<int>(calls_.size()); }

  // The program that records on this thread, or null.
  static Program* recording();

 private:
  int max_rows_;
  std::vector<Call> calls_;
};

// Makes a call of `num_rows` rows, or records it. The interpreter lock is released while it runs.
template <class F>
void submit(std::int64_t num_rows, F&& call) {
  if (Program* program = Program::recording()) {
    program->append(num_rows, std::forward<F>(call));
    return;
  }
  nanobind::gil_scoped_release unlocked;
  call(static_cast<int>(num_rows));
}

}  // namespace tokenmill
