// Recorded steps, as a Python class.
#include <chrono>
#include <stdexcept>
#include <string>
#include <tuple>

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "program.h"

namespace nb = nanobind;

namespace tokenmill {
namespace {

thread_local Program* current = nullptr;

}  // namespace

Program::Program(int max_rows) : max_rows_(max_rows) {
  if (max_rows < 1) throw std::invalid_argument("max_rows must be at least 1");
}

Program::~Program() { end(); }

Program* Program::recording() { return current; }

void Program::begin() {
  if (current != nullptr) throw std::invalid_argument("a program is being recorded already");
  current = this;
}

void Program::end() {
  if (current == this) current = nullptr;
}

void Program::append(CallLabel label, std::int64_t num_rows, Call call) {
  if (num_rows != max_rows_)
    throw std::invalid_argument("a call of " + std::to_string(num_rows) +
                                " rows cannot be recorded in a program of " +
                                std::to_string(max_rows_));
  calls_.push_back({std::move(call), label, {}});
}

void Program::run(int num_rows) {
  if (num_rows < 1 || num_rows > max_rows_)
    throw std::invalid_argument("num_rows must be within [1, " + std::to_string(max_rows_) + "]");
  if (current != nullptr) throw std::invalid_argument("a program is being recorded");
  if (!timed_) {
    for (const LabelledCall& each : calls_) each.call(num_rows);
    return;
  }
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin = Clock::now();
  for (LabelledCall& each : calls_) {
    each.call(num_rows);
    const Clock::time_point end = Clock::now();
    ++each.time.num_calls;
    each.time.seconds += std::chrono::duration<double>(end - begin).count();
    begin = end;
  }
}

std::map<std::string, CallTime> Program::take_times() {
  std::map<std::string, CallTime> times;
  for (LabelledCall& each : calls_) {
    std::string label = each.label.name;
    if (each.label.columns > 0)
      label += " " + std::to_string(each.label.columns) + " x " + std::to_string(each.label.depth);
    CallTime& total = times[label];
    total.num_calls += each.time.num_calls;
    total.seconds += each.time.seconds;
    each.time = {};
  }
  return times;
}

void bind_program(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def(nb::init<int>(), nb::arg("max_rows"))
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("replay", [](Program& program, int num_rows) {
        nb::gil_scoped_release unlocked;
        program.run(num_rows);
      }, nb::arg("num_rows"))
      .def_prop_rw("timed", &Program::timed, &Program::set_timed)
      .def("take_times", [](Program& program) {
        std::map<std::string, std::tuple<int, double>> times;
        for (const auto& [label, time] : program.take_times())
          times[label] = {time.num_calls, time.seconds};
        return times;
      })
      .def_prop_ro("num_calls", &Program::num_calls);
}

}  // namespace tokenmill
