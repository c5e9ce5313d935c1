// A library whose functions are found at run time.
#pragma once

#include <dlfcn.h>

namespace twinop {

// A derived structure has the functions as members: `int (*Init)(unsigned) = Find("cuInit");`.
struct DynamicLibrary {
  struct Symbol {
    void* address;
    template <class Function>
    operator Function*() const {  // NOLINT(google-explicit-constructor): of its member's type
      return reinterpret_cast<Function*>(address);
    }
  };
  Symbol Find(const char* name) {
    void* const address = dlsym(handle, name);
    if (address == nullptr) missing = name;
    return {address};
  }

  void* handle;
  const char* missing = nullptr;  // the name of a function that it does not have
};

}  // namespace twinop
