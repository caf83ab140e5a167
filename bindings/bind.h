#pragma once

#include <pybind11/pybind11.h>

namespace orlop::python {

// One function per file of the module; called in the order of module.cc, since a signature shows
// the Python name only of types that are bound already.
void bind_errors(pybind11::module_& module);
void bind_config(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_data(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_ranks(pybind11::module_& module);
void bind_async_file(pybind11::module_& module);
void bind_drives(pybind11::module_& module);
void bind_tensor_optimizer(pybind11::module_& module);
void bind_weight_drives(pybind11::module_& module);
void bind_device_optimizer(pybind11::module_& module);

// Comes, with the GIL, before every call that joins the ranks: under torchrun, its store tells
// where they meet.
inline void prepare_to_join() {
  pybind11::module_::import("orlop.rendezvous").attr("prepare_rendezvous")();
}

// A constructor that takes the members of T by keyword; a name that T lacks raises AttributeError.
template <typename T, typename Class>
void def_keyword_init(Class& bound) {
  bound.def(pybind11::init([](const pybind11::kwargs& members) {
    T value;
    const pybind11::object view = pybind11::cast(&value, pybind11::return_value_policy::reference);
    for (const auto& [name, member] : members) pybind11::setattr(view, name, member);
    return value;
  }));
}

}  // namespace orlop::python
