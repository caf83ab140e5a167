#pragma once

#include <cstdint>

#include "orlop/tensor_optimizer.h"

namespace orlop::python {

// How Python hands over memory that is not the module's own: as torch and ctypes tell it.
using Address = uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// `wait`: of an int(void*) that returns 0 once what is waited for is over; `handle`: its argument.
inline Fence make_fence(Address wait, Address handle) {
  return {reinterpret_cast<int (*)(void*)>(wait), pointer<void>(handle)};
}

}  // namespace orlop::python
