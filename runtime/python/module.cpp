// coda_edge._runtime: the C runtime for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "coda.h"

namespace nb = nanobind;

static std::vector<std::string> cpu_features() {
  const char *names[128];
  size_t count = coda_cpu_features(names, 128);
  return std::vector<std::string>(names, names + count);
}

NB_MODULE(_runtime, m) {
  m.def("cpu_features", &cpu_features, "Names of this CPU's features that a bundle may ask for.");
}
