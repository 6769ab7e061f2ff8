// Recorded steps, as a Python class.
#include <stdexcept>
#include <string>

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

void Program::append(std::int64_t num_rows, Call call) {
  if (num_rows != max_rows_)
    throw std::invalid_argument("a call of " + std::to_string(num_rows) +
                                " rows cannot be recorded in a program of " +
                                std::to_string(max_rows_));
  calls_.push_back(std::move(call));
}

void Program::replay(int num_rows) const {
  if (num_rows < 1 || num_rows > max_rows_)
    throw std::invalid_argument("num_rows must be within [1, " + std::to_string(max_rows_) + "]");
  if (current != nullptr) throw std::invalid_argument("a program is being recorded");
  nb::gil_scoped_release unlocked;
  for (const Call& call : calls_) call(num_rows);
}

void bind_program(nb::module_& module) {
  nb::class_<Program>(module, "Program")
      .def(nb::init<int>(), nb::arg("max_rows"))
      .def("begin", &Program::begin)
      .def("end", &Program::end)
      .def("replay", &Program::replay, nb::arg("num_rows"))
      .def_prop_ro("num_calls", &Program::num_calls);
}

}  // namespace tokenmill
