// Objects of one process (core/base/fork.h) in the hands of Python: nobody gets at them in a child.
#pragma once
#include <type_traits>
#include <utility>

#include "core/base/fork.h"
#include "module.h"

// Every call that takes such an object, by reference or pointer, throws invalid in a child. None is
// to take it as a shared pointer, whose conversion cannot throw: shared_from_this() makes one.
template <typename Type>
struct nanobind::detail::type_caster<
    Type, nanobind::detail::enable_if_t<std::is_base_of_v<offcore::OfProcess, Type>>>
    : type_caster_base<Type> {
  using Base = type_caster_base<Type>;
  operator Type*() {
    Type* const object = Base::operator Type*();
    if (object != nullptr) object->check_here();
    return object;
  }
  operator Type&() { return *operator Type*(); }
  operator Type&&() { return std::move(*operator Type*()); }
};

namespace offcore {

// For close(), which does nothing in a child: null there.
template <typename Type>
Type* if_here(nb::handle_t<Type> self) {
  Type* const object = nb::inst_ptr<Type>(self);
  return object->here() ? object : nullptr;
}

// Holds a value, and in a child for good.
template <typename Value>
nb::capsule capsule_of(Value value) {
  auto* held = new OwnedHere<Value>(new Value(std::move(value)));
  return {held, [](void* p) noexcept { delete static_cast<OwnedHere<Value>*>(p); }};
}

}  // namespace offcore
