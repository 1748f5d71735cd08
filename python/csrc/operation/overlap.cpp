#include "operation/overlap.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "device/order/streams.h"

namespace tpurun {

namespace {

struct Dim {
  uintptr_t size;
  uintptr_t stride;  // in bytes
};

// The memory of a tensor: runs of bytes without gaps, repeated along dimensions.
struct Layout {
  uintptr_t begin;
  uintptr_t end;
  uintptr_t run;
  std::vector<Dim> dims;  // by stride, the smallest first
  bool is_apart;          // the strides alone show that no two elements share a byte
};

Layout layout_of(const at::Tensor& tensor) {
  device::streams::run_deferred(device::streams::Cut::kOperation);
  const auto itemsize = static_cast<uintptr_t>(tensor.element_size());
  Layout layout{reinterpret_cast<uintptr_t>(tensor.data_ptr()), 0, itemsize, {}, true};
  std::vector<Dim> dims;
  for (int64_t at = 0; at < tensor.dim(); ++at) {
    if (tensor.size(at) > 1) {
      dims.push_back(
          {static_cast<uintptr_t>(tensor.size(at)), static_cast<uintptr_t>(tensor.stride(at)) * itemsize});
    }
  }
  std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  uintptr_t extent = itemsize;
  for (const auto& dim : dims) {
    layout.is_apart = layout.is_apart && dim.stride >= extent;
    extent += (dim.size - 1) * dim.stride;
    if (layout.dims.empty() && dim.stride == layout.run) {
      layout.run *= dim.size;
    } else {
      layout.dims.push_back(dim);
    }
  }
  layout.end = layout.begin + extent;
  return layout;
}

// One bit for each unit of memory, to be taken once.
class Marks {
 public:
  explicit Marks(uintptr_t units) : words_(units / kBits + 1) {}

  // False when one of them was taken before.
  bool take(uintptr_t first, uintptr_t count) {
    while (count != 0) {
      const uintptr_t bit = first % kBits;
      const uintptr_t here = std::min(count, kBits - bit);
      const uint64_t mask = (here == kBits ? ~uint64_t{0} : (uint64_t{1} << here) - 1) << bit;
      uint64_t& word = words_[first / kBits];
      if ((word & mask) != 0) {
        return false;
      }
      word |= mask;
      first += here;
      count -= here;
    }
    return true;
  }

 private:
  static constexpr uintptr_t kBits = 64;
  std::vector<uint64_t> words_;
};

// Takes all runs of a layout; `origin` is where the marks begin.
bool take_runs(Marks& marks, const Layout& layout, uintptr_t origin, uintptr_t unit) {
  std::vector<uintptr_t> index(layout.dims.size(), 0);
  uintptr_t address = layout.begin;
  while (true) {
    if (!marks.take((address - origin) / unit, layout.run / unit)) {
      return false;
    }
    size_t dim = 0;
    while (dim < index.size() && index[dim] + 1 == layout.dims[dim].size) {
      address -= index[dim] * layout.dims[dim].stride;
      index[dim++] = 0;
    }
    if (dim == index.size()) {
      return true;
    }
    ++index[dim];
    address += layout.dims[dim].stride;
  }
}

using Layouts = std::vector<Layout>;

// Says whether any two of these layouts share a byte. The bounds of each overlap with those of the next.
bool share_bytes_in(Layouts::const_iterator first, Layouts::const_iterator last, uintptr_t itemsize) {
  if (last - first == 1 && first->is_apart) {
    return false;
  }
  uintptr_t end = first->end;
  uintptr_t unit = itemsize;
  for (auto layout = first; layout != last; ++layout) {
    end = std::max(end, layout->end);
    unit = std::gcd(unit, layout->begin - first->begin);
  }
  Marks marks((end - first->begin) / unit);
  return !std::all_of(first, last,
                      [&](const Layout& layout) { return take_runs(marks, layout, first->begin, unit); });
}

}  // namespace

bool share_bytes(const std::vector<at::Tensor>& tensors) {
  Layouts layouts;
  uintptr_t itemsize = 0;
  for (const auto& tensor : tensors) {
    if (tensor.numel() != 0) {
      layouts.push_back(layout_of(tensor));
      itemsize = std::gcd(itemsize, static_cast<uintptr_t>(tensor.element_size()));
    }
  }
  std::sort(layouts.begin(), layouts.end(),
            [](const Layout& a, const Layout& b) { return a.begin < b.begin; });
  for (auto first = layouts.cbegin(); first != layouts.cend();) {
    auto last = first + 1;
    for (uintptr_t end = first->end; last != layouts.cend() && last->begin < end; ++last) {
      end = std::max(end, last->end);
    }
    if (share_bytes_in(first, last, itemsize)) {
      return true;
    }
    first = last;
  }
  return false;
}

}  // namespace tpurun
