// What Python calls: statistics, streams that have no function in torch._C of a CPU build, and process groups.
#include "collectives.cpp"
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

namespace softcuda {
namespace {
py::dict as_dict(const Counter& counter) {
  py::dict result;
  result["current"] = counter.current;
  result["peak"] = counter.peak;
  result["allocated"] = counter.allocated;
  result["freed"] = counter.freed;
  return result;
}
py::object listener, observer;

void call_listener(const char* kind, const char* text) {
  py::gil_scoped_acquire gil;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  try { listener(kind, text); } catch (py::error_already_set& error) { error.discard_as_unraisable("softcuda"); }
  PyErr_Restore(type, value, trace);
}
void call_observer(int device, int64_t requested, int64_t total, int64_t free) {
  py::gil_scoped_acquire gil;
  observer(device, requested, total, free);
}

c10::intrusive_ptr<Group> make_group(c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<Store> positions, Ranks ranks, std::string name, int64_t milliseconds, bool own,
                                       py::function connect, py::function split) {
  // the functions live as long as the process: a group may be freed after the interpreter is gone
  auto* connects = new py::function(std::move(connect));
  auto* splits = new py::function(std::move(split));
  return c10::make_intrusive<Group>(
      gloo->getRank(), gloo->getSize(),
      Group::Settings{gloo, positions, std::move(ranks), std::move(name), std::chrono::milliseconds(milliseconds), own,
                      [connects](int device) { py::gil_scoped_acquire gil; (*connects)(device); },
                      [splits](c10::intrusive_ptr<Store> store, std::vector<int> some) {
                        py::gil_scoped_acquire gil;
                        return (*splits)(store, some).cast<c10::intrusive_ptr<Backend>>();
                      }});
}
}  // namespace
}  // namespace softcuda

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace softcuda;
  m.def("has_context", &has_context);
  m.def("spoil_forks", [] { torch::utils::register_fork_handler_for_device_init(ACCELERATOR); });
  m.def("is_bad_fork", [] { return torch::utils::is_device_in_bad_fork(ACCELERATOR); });
  m.def("elapsed_time", [](uintptr_t first, uintptr_t second) {
    return elapsed_milliseconds(reinterpret_cast<const void*>(first), reinterpret_cast<const void*>(second));
  });
  m.def("findings", [] {
    py::dict result;
    result["race"] = count_findings(Finding::race);
    result["hang"] = count_findings(Finding::hang);
    result["wait"] = count_findings(Finding::wait);
    result["unpinned"] = count_findings(Finding::unpinned);
    return result;
  });
  m.def("listen", [](py::function call) { listener = call; listen(&call_listener); });
  m.def("statistics", [](int device) {
    auto& is = statistics(device);
    py::dict result;
    result["allocations"] = as_dict(is.allocations);
    result["allocated"] = as_dict(is.allocated);
    result["reserved"] = as_dict(is.reserved);
    result["requested"] = as_dict(is.requested);
    result["out_of_memory"] = is.out_of_memory;
    return result;
  });
  m.def("reset_peaks", &reset_peaks);
  m.def("empty_cache", &empty_cache);
  m.def("limit_memory", &limit_memory);
  m.def("memory_info", &memory_info);
  m.def("record_history", &record_history);
  m.def("history", [] {
    py::list result;
    for (auto& entry : history()) result.append(py::make_tuple(entry.allocation, entry.device, entry.address, entry.size, entry.stream));
    return result;
  });
  m.def("live_blocks", [] {
    py::list result;
    for (auto& block : live_blocks()) result.append(py::make_tuple(block.device, block.address, block.size, block.requested, block.stream));
    return result;
  });
  m.def("observe_out_of_memory", [](py::function call) { observer = call; observe_out_of_memory(&call_observer); });
  m.def("pinned_statistics", [] { return py::make_tuple(as_dict(pinned_statistics().active), as_dict(pinned_statistics().owned)); });
  m.def("reset_pinned_peaks", [] {
    for (auto* counter : {&pinned_statistics().active, &pinned_statistics().owned}) counter->peak = counter->current;
  });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("resize_storage", torch::wrap_pybind_function([](size_t storage, int64_t bytes) { resize_storage(reinterpret_cast<c10::StorageImpl*>(storage), bytes); }));
  m.def("bind_groups", [m]() mutable {  // once torch.distributed is there, which registers the base class
    py::class_<Group, c10::intrusive_ptr<Group>, Backend>(m, "Group")
        .def(py::init(&make_group))
        .def("_set_sequence_number_for_group", [](Group&) {})
        .def("perform_nocolor_split", [](Group&, py::object) {})
        .def("abort", [](Group&) {})
        .def("shutdown", [](Group&) {});
  });
}
