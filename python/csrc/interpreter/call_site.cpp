#include "interpreter/call_site.h"

#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

#include "interpreter/gil.h"

namespace py = pybind11;

namespace tpurun {

namespace {

constexpr int kMaxFrames = 64;
constexpr size_t kMaxCodes = 4096;
constexpr size_t kMaxLinesPerCode = 64;

// The facts about one code object are kept, because its lines are few and its file never changes.
struct Code {
  bool plumbing = false;  // torch itself, or what torch's wrappers pass through
  std::string package;    // the package that was installed with it, or empty for the program's own code
  std::string function;
  std::string file;
  std::vector<std::pair<int, std::string>> sites;  // by offset of the instruction
};

bool ends_with(std::string_view text, std::string_view tail) {
  return text.size() >= tail.size() && text.substr(text.size() - tail.size()) == tail;
}

// Known code objects. They are kept alive, so that an address never comes to mean another function. All
// access is under the GIL; never destroyed, because at exit there is no interpreter left to release them.
class CodeCache {
 public:
  CodeCache() : torch_(torch_directory()), standard_(standard_directory()) {}

  Code& at(PyCodeObject* code) {
    if (auto known = codes_.find(code); known != codes_.end()) {
      return known->second;
    }
    if (codes_.size() >= kMaxCodes) {
      clear();
    }
    Py_INCREF(code);
    return codes_.emplace(code, describe(code)).first->second;
  }

 private:
  static std::string torch_directory() {
    const auto file = py::module_::import("torch").attr("__file__").cast<std::string>();
    return file.substr(0, file.rfind('/') + 1);
  }

  static std::string standard_directory() {
    const auto path = py::module_::import("sysconfig").attr("get_path")("stdlib").cast<std::string>();
    return path + "/";
  }

  // The package of a file that was installed rather than written: the folder below site-packages.
  std::string package_of(std::string_view path) const {
    for (const std::string_view home : {"/site-packages/", "/dist-packages/"}) {
      if (const auto at = path.find(home); at != std::string_view::npos) {
        const auto package = path.substr(at + home.size());
        return std::string(package.substr(0, package.find_first_of("/.")));
      }
    }
    if (path.substr(0, standard_.size()) == standard_) {
      const auto module = path.substr(standard_.size());
      return std::string(module.substr(0, module.find_first_of("/.")));
    }
    return path.substr(0, 8) == "<frozen " ? "python" : "";
  }

  Code describe(PyCodeObject* code) const {
    Py_ssize_t bytes = 0;
    const char* text = PyUnicode_AsUTF8AndSize(code->co_filename, &bytes);
    if (text == nullptr) {
      PyErr_Clear();
      return Code{};
    }
    const std::string_view path(text, static_cast<size_t>(bytes));
    Code described;
    described.plumbing = path.substr(0, torch_.size()) == torch_ || ends_with(path, "/contextlib.py");
    described.package = package_of(path);
    if (const char* name = PyUnicode_AsUTF8(code->co_name); name != nullptr) {
      described.function = name;
    } else {
      PyErr_Clear();
    }
    described.file = path.substr(path.rfind('/') + 1);  // all of it without a slash
    return described;
  }

  void clear() {
    for (auto& [code, described] : codes_) {
      Py_DECREF(code);
    }
    codes_.clear();
  }

  std::string torch_;
  std::string standard_;
  std::unordered_map<PyCodeObject*, Code> codes_;
};

CodeCache& code_cache() {
  static auto* cache = new CodeCache();
  return *cache;
}

std::string site_in(Code& code, PyCodeObject* object, int offset) {
  for (const auto& [known, site] : code.sites) {
    if (known == offset) {
      return site;
    }
  }
  std::string site = code.file + ":" + std::to_string(PyCode_Addr2Line(object, offset));
  if (code.sites.size() < kMaxLinesPerCode) {
    code.sites.emplace_back(offset, site);
  }
  return site;
}

// The innermost line of the program, and the function of a library that it got here by; where only libraries
// are on the stack, their innermost line.
std::string innermost_user_frame() {
  auto& cache = code_cache();
  std::string library_site;
  std::string by;
  auto frame = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  for (int depth = 0; frame && depth < kMaxFrames; ++depth) {
    auto* raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
    auto* object = reinterpret_cast<PyCodeObject*>(owner.ptr());
    Code& code = cache.at(object);
    if (!code.plumbing && code.package.empty()) {
      return site_in(code, object, PyFrame_GetLasti(raw)) + by;
    }
    if (!code.plumbing && library_site.empty()) {
      library_site = site_in(code, object, PyFrame_GetLasti(raw));
      by = ", by " + code.package + "'s " + code.function;
    }
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return library_site;
}

}  // namespace

void prepare_call_sites() { code_cache(); }

thread_local const std::string* FromLine::current = nullptr;

FromLine::FromLine(const std::string& line) : before_(std::exchange(current, &line)) {}
FromLine::~FromLine() { current = before_; }

std::string call_site() { return caller().site; }

Caller caller() {
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
    return {};
  }
  const py::gil_scoped_acquire gil;
  const uint32_t threads = count_python_threads();
  if (FromLine::current != nullptr && !FromLine::current->empty()) {
    return {*FromLine::current, threads};
  }
  // An exception may be on its way through this thread already; looking around must not disturb it, and runs
  // no code of Python, in which Ctrl-C could be raised and be lost.
  const py::error_scope pending;
  try {
    return {innermost_user_frame(), threads};
  } catch (const std::exception&) {
    return {{}, threads};  // the site is a courtesy of the message, never a reason to fail
  }
}

}  // namespace tpurun
