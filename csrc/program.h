// A recorded step: kernel calls on fixed buffers with one open number, the rows of the step.
//
// While a program records, the bindings hand their calls to it instead of making them. Recorded at
// the largest number of rows, it serves every smaller one: rows come first in each buffer.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

namespace tokenmill {

// What a profile calls a kernel: its name and, for products, the weight's columns and depth.
struct CallLabel {
  const char* name;
  int columns = 0, depth = 0;
};

struct CallTime {
  int num_calls = 0;
  double seconds = 0.0;
};

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
  void append(CallLabel label, std::int64_t num_rows, Call call);

  // Makes all calls, for 1 to max_rows rows. To be called without the interpreter lock.
  void run(int num_rows);

  // While a program is timed, replays read the clock around each call.
  void set_timed(bool timed) { timed_ = timed; }
  bool timed() const { return timed_; }

  // The times since the last question, by label.
  std::map<std::string, CallTime> take_times();

  int num_calls() const { return static_cast<int>(calls_.size()); }
  int max_rows() const { return max_rows_; }

  // The program that records on this thread, or null.
  static Program* recording();

 private:
  struct LabelledCall {
    Call call;
    CallLabel label;
    CallTime time;
  };

  int max_rows_;
  bool timed_ = false;
  std::vector<LabelledCall> calls_;
};

// Makes a call of `num_rows` rows, or records it. The interpreter lock is released while it runs.
template <class F>
void submit(CallLabel label, std::int64_t num_rows, F&& call) {
  if (Program* program = Program::recording()) {
    program->append(label, num_rows, std::forward<F>(call));
    return;
  }
  nanobind::gil_scoped_release unlocked;
  call(static_cast<int>(num_rows));
}

}  // namespace tokenmill
