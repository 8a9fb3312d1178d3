// `cuda:0` and `cuda:1` for a build of torch that has no CUDA, in the memory of the host.
//
// What this shows and what it cannot see is written in __init__.py. From top to bottom:
//   events      what is counted: launches, waits of the host, copies, uses of a generator
//   memory      an allocator that keeps what is freed, as CUDA's does, and may have a limit
//   torch's own interfaces of a device: the guard, generators, hooks
//   kernels     every operator runs as the host's kernel on the same memory
//   operators   the few that only change what a tensor says of its memory, and copies
//   C functions what Python calls

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

using at::IntArrayRef;
using at::Tensor;
using c10::Device;
using c10::IValue;

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr auto KEYS = c10::DispatchKeySet(c10::DispatchKey::CUDA);
constexpr int DEVICES = 2;
thread_local int current_device = 0;

int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
bool is_simulated(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }

// --- events

std::mutex mutex;
bool is_counting = false, may_wait = true;
std::map<std::string, int64_t> counts;  // by "kind name", the kind being launch, wait, copy or generator
void (*on_wait)(const char*) = nullptr;
thread_local int inner = 0;  // how deep in a kernel of the host this thread is: nothing of it is counted

struct Inner {
  Inner() { ++inner; }
  ~Inner() { --inner; }
};

void count(const std::string& kind, const std::string& name, int64_t times = 1) {
  if (inner || !is_counting) return;
  std::lock_guard<std::mutex> lock(mutex);
  counts[kind + " " + name] += times;
}

void wait(const std::string& name) {
  if (inner) return;
  count("wait", name);
  if (is_counting && on_wait) on_wait(name.c_str());
  TORCH_CHECK(may_wait, "called a synchronizing CUDA operation: ", name);
}

// --- memory

struct Memory {
  int64_t live = 0, peak = 0, reserved = 0, limit = int64_t(1) << 30;
  std::multimap<size_t, void*> unused;
} memories[DEVICES];
std::unordered_map<void*, std::pair<size_t, int>> blocks;  // their size and device

void release(void* block) {
  if (!block) return;
  std::lock_guard<std::mutex> lock(mutex);
  auto [size, device] = blocks.at(block);
  blocks.erase(block);
  memories[device].live -= size;
  memories[device].unused.emplace(size, block);
}

struct SimulatedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device;
    auto& memory = memories[device];
    size_t size = (bytes + 511) / 512 * 512;
    void* block = nullptr;
    if (size) {
      std::lock_guard<std::mutex> lock(mutex);
      TORCH_CHECK_WITH(
          OutOfMemoryError, memory.live + (int64_t)size <= memory.limit,
          "CUDA out of memory. Tried to allocate ", bytes, " bytes (simulated).");
      auto found = memory.unused.find(size);
      if (found != memory.unused.end()) {
        block = found->second;
        memory.unused.erase(found);
      } else {
        block = aligned_alloc(512, size);
        TORCH_CHECK(block, "the host has no ", bytes, " bytes for the simulated device");
        memory.reserved += size;
      }
      blocks[block] = {size, device};
      memory.live += size;
      memory.peak = std::max(memory.peak, memory.live);
    }
    return {block, block, &release, Device(CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} allocator;

struct On {  // a scope with another current device
  int before = current_device;
  explicit On(int device) { current_device = device; }
  ~On() { current_device = before; }
};

// --- torch's own interfaces of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  // Everything runs in the order in which it is called, so all streams are one.
  static c10::Stream only(Device device) {
    return c10::Stream(c10::Stream::DEFAULT, Device(CUDA, index_of(device)));
  }
  c10::Stream getStream(Device device) const override { return only(device); }
  c10::Stream getNewStream(Device device, int) const override { return only(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return only(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return only(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  bool queryEvent(void*) const override { return true; }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);  // any pointer that is not null
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void synchronizeStream(const c10::Stream&) const override { wait("Stream.synchronize"); }
  void synchronizeEvent(void*) const override { wait("Event.synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait("synchronize"); }
};

struct Registered {
  Registered() {
    c10::impl::device_guard_impl_registry[(int)CUDA].store(new Guard());
    c10::SetAllocator(CUDA, &allocator, 255);
  }
} registered;

// A generator of a device is one of the host, which kernels on that device draw from.
struct SimulatedGenerator final : c10::GeneratorImpl {
  at::Generator host;
  SimulatedGenerator(int device, at::Generator host)
      : c10::GeneratorImpl(Device(CUDA, device), KEYS), host(std::move(host)) {}
  explicit SimulatedGenerator(int device)
      : SimulatedGenerator(device, at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}

  void set_current_seed(uint64_t seed) override {
    count("generator", "seed");
    host.set_current_seed(seed);
  }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    count("generator", "set_state");
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    count("generator", "get_state");
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  c10::GeneratorImpl* clone_impl() const override {
    return new SimulatedGenerator(device().index(), host.clone());
  }
};

at::Generator& host_generator(const at::Generator& generator) {
  return static_cast<SimulatedGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

const at::Generator& default_generator(int device) {
  static const at::Generator generators[DEVICES] = {
      at::make_generator<SimulatedGenerator>(0), at::make_generator<SimulatedGenerator>(1)};
  return generators[device < 0 ? current_device : device];
}

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<SimulatedGenerator>(device < 0 ? ::current_device : device);
  }
  Device getDeviceFromPtr(void* data) const override {
    std::lock_guard<std::mutex> lock(mutex);
    return Device(CUDA, blocks.at(data).second);
  }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { wait("synchronize"); }
};

// torch has asked for its hooks when it was imported, and keeps those without a device. They have no fields, so the
// table of the virtual functions of ours makes them ours.
struct Exchanged {
  Exchanged() {
    static Hooks ours;
    auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
    *reinterpret_cast<void**>(&hooks) = *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&ours));
  }
} exchanged;

// --- kernels

Tensor on_host(const Tensor& tensor) {  // the same memory
  auto& storage = tensor.storage();
  c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(storage.mutable_data(), Device(c10::kCPU)), c10::GetCPUAllocator(), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* info = result.unsafeGetTensorImpl();
  info->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  info->set_storage_offset(tensor.storage_offset());
  if (tensor.is_conj()) result._set_conj(true);
  if (tensor.is_neg()) result._set_neg(true);
  return result;
}

Tensor on_device(const Tensor& tensor, int device) {  // a copy
  On scope(device);
  Tensor result = at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), &allocator, KEYS, tensor.scalar_type());
  Inner quiet;
  on_host(result).copy_(tensor);
  return result;
}

Tensor view(const Tensor& of, const Tensor& host) {  // as the host's view of the same memory is
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(of.storage()), KEYS, host.dtype());
  auto* info = result.unsafeGetTensorImpl();
  info->set_sizes_and_strides(host.sizes(), host.strides());
  info->set_storage_offset(host.storage_offset());
  return result;
}

// Operators whose result has a shape that only the device knows, or that return a number to the host.
const std::set<std::string> WAITING = {
    "aten::bincount", "aten::equal", "aten::masked_select", "aten::masked_select.out", "aten::nonzero",
    "aten::nonzero.out", "aten::repeat_interleave.Tensor", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive"};
// Operators that take indices from the host.
const std::set<std::string> INDEXING = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_"};
// Views that come here: no kernels.
const std::set<std::string> VIEWS = {"aten::view_as_real", "aten::view_as_complex"};

// How many kernels a `_foreach_` or `_fused_` operator launches: one for so many tensors if all lists are alike, which
// are the same limits as in torch (ForeachUtils.h, MultiTensorApply.cuh); otherwise one for each tensor. Lists may have
// different dtypes where the operator `casts`, as `_foreach_copy_` does.
int64_t launches_for(const std::vector<std::vector<Tensor>>& lists, bool casts) {
  if (lists.empty() || lists[0].empty()) return 1;
  int64_t length = lists[0].size();
  for (auto& list : lists)
    for (size_t i = 0; i < list.size(); ++i) {
      auto& tensor = list[i];
      auto& first = (casts ? list : lists[0])[0];
      auto& partner = lists[0][i < lists[0].size() ? i : 0];
      bool alike = tensor.scalar_type() == first.scalar_type() && tensor.device() == first.device() &&
                   tensor.is_non_overlapping_and_dense() && tensor.sizes() == partner.sizes() &&
                   tensor.strides() == partner.strides();
      if (!alike) return length;
    }
  static const int64_t most[] = {110, 64, 48, 36, 30};
  int64_t limit = most[std::min<size_t>(lists.size(), 5) - 1];
  return (length + limit - 1) / limit;
}

bool begins(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

// One call of an operator: its arguments are put on the host, and its results on the device.
struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack& stack;
  const std::string name = c10::toString(op.operator_name());
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const size_t first = stack.size() - arguments.size();
  const bool is_foreach = begins(name, "aten::_foreach_") || begins(name, "aten::_amp_foreach");

  int device = -1;  // that of the first tensor
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);  // from the device's own generator
  std::vector<IValue> given{stack.begin() + first, stack.end()};
  std::vector<std::vector<Tensor>> lists;
  std::vector<std::pair<Tensor, Tensor>> written;  // of the device, of the host

  Tensor lend(const Tensor& tensor, bool is_written, bool in_list) {
    if (!tensor.defined()) return tensor;
    if (!is_simulated(tensor)) {
      bool is_number = tensor.device().is_cpu() && tensor.dim() == 0 && (!in_list || is_foreach);
      if (INDEXING.count(name) && !is_number) {
        wait("indices from the host");
        return tensor;
      }
      TORCH_CHECK(
          is_number, "Expected all tensors to be on the same device, but found at least two devices, cuda:",
          std::max(device, 0), " and ", tensor.device(), "! (", name, ")");
      return tensor;
    }
    if (device < 0) device = tensor.device().index();
    TORCH_CHECK(
        is_foreach || device == tensor.device().index(),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and ",
        tensor.device(), "! (", name, ")");
    Tensor host = on_host(tensor);
    if (is_written) written.emplace_back(tensor, host);
    return host;
  }

  void lend_arguments() {
    for (size_t i = 0; i < arguments.size(); ++i) {
      IValue& value = stack[first + i];
      bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
      if (value.isTensor()) {
        value = lend(value.toTensor(), is_written, false);
      } else if (value.isTensorList()) {
        lists.push_back(value.toTensorVector());
        std::vector<Tensor> hosts;
        for (auto& tensor : lists.back()) hosts.push_back(lend(tensor, is_written, true));
        value = hosts;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> hosts;
        for (std::optional<Tensor> index : value.toOptionalTensorList()) {
          // `index` has asked for the places of a mask already.
          bool is_mask = index && is_simulated(*index) && index->scalar_type() == at::kBool;
          if (is_mask && name != "aten::index.Tensor_out") wait("a mask as index");
          hosts.push_back(index ? std::make_optional(lend(*index, false, false)) : index);
        }
        value = hosts;
      } else if (value.isGenerator()) {
        auto generator = value.toGenerator();
        TORCH_CHECK(generator.device().type() == CUDA, "Expected a 'cuda' device type for generator (", name, ")");
        value = host_generator(generator);
        draws = false;
      } else if (value.isDevice()) {
        if (device < 0) device = index_of(value.toDevice());
        value = Device(c10::kCPU);
      }
    }
    if (device < 0) device = current_device;
  }

  void run() {
    Inner quiet;
    if (!draws) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    // Whoever draws without naming a generator draws from the host's, which has the device's state meanwhile.
    auto* hosts = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
    auto* ours = host_generator(default_generator(device)).unsafeGetGeneratorImpl();
    auto before = hosts->get_state();
    hosts->set_state(*ours->get_state());
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    } catch (...) {
      hosts->set_state(*before);
      throw;
    }
    ours->set_state(*hosts->get_state());
    hosts->set_state(*before);
  }

  void count_it() {
    if (VIEWS.count(name)) return;
    bool is_of_lists = is_foreach || begins(name, "aten::_fused_");
    count("launch", name, is_of_lists ? launches_for(lists, begins(name, "aten::_foreach_copy_")) : 1);
    if (WAITING.count(name)) wait(name);
  }

  // An output that the kernel has resized says so.
  void put_sizes() {
    for (auto& [ours, host] : written) {
      auto* info = ours.unsafeGetTensorImpl();
      if (host.storage().data() != ours.storage().data()) {
        Tensor moved = on_device(host, ours.device().index());
        info->set_storage_keep_dtype(moved.storage());
        info->set_sizes_and_strides(moved.sizes(), moved.strides());
        info->set_storage_offset(0);
      } else if (host.sizes() != ours.sizes() || host.strides() != ours.strides()) {
        info->set_sizes_and_strides(host.sizes(), host.strides());
      }
    }
  }

  // What a result shares memory with, if it does.
  const IValue* aliased(const c10::Argument& result) {
    for (size_t i = 0; result.alias_info() && i < arguments.size(); ++i)
      if (arguments[i].alias_info() && *arguments[i].alias_info() == *result.alias_info() && !given[i].isNone())
        return &given[i];
    return nullptr;
  }

  void take_results() {
    auto& results = op.schema().returns();
    size_t start = stack.size() - results.size();
    for (size_t i = 0; i < results.size(); ++i) {
      IValue& value = stack[start + i];
      if (const IValue* argument = aliased(results[i])) {
        bool is_argument = results[i].alias_info()->isWrite() || !value.isTensor();
        value = is_argument ? *argument : view(argument->toTensor(), value.toTensor());
      } else if (value.isTensor() && value.toTensor().defined()) {
        value = on_device(value.toTensor(), device);
      } else if (value.isTensorList()) {
        std::vector<Tensor> tensors = value.toTensorVector();
        for (size_t at = 0; at < tensors.size(); ++at) {
          bool has_partner = is_foreach && !lists.empty() && at < lists[0].size() && is_simulated(lists[0][at]);
          tensors[at] = on_device(tensors[at], has_partner ? lists[0][at].device().index() : device);
        }
        value = tensors;
      }
    }
  }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call{op, *stack};
  call.lend_arguments();
  call.count_it();
  call.run();
  call.put_sizes();
  call.take_results();
}

// --- operators

using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Where = std::optional<Device>;
using Pinned = std::optional<bool>;
using Format = std::optional<c10::MemoryFormat>;

Tensor empty(IntArrayRef size, Dtype dtype, Layout, Where device, Pinned, Format format) {
  On scope(device ? index_of(*device) : current_device);
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Dtype dtype, Layout, Where device, Pinned) {
  On scope(device ? index_of(*device) : current_device);
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

c10::Scalar item(const Tensor& self) {
  wait("item");
  Inner quiet;
  return on_host(self).item();
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  bool to = is_simulated(self), of = is_simulated(from);
  if (to && of) {
    count("launch", "aten::copy_");
  } else {
    count("copy", to ? "to the device" : "to the host");
    // What comes from memory that is not pinned is staged. What goes there is waited for, whatever is asked for.
    if (!to || !non_blocking) wait(to ? "a copy to the device" : "a copy to the host");
  }
  Inner quiet;
  Tensor target = to ? on_host(self) : self;
  target.copy_((of ? on_host(from) : from).expand_as(target));
  return self;
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, Format format) {
  auto* info = self.unsafeGetTensorImpl();
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    On scope(self.device().index());
    auto block = allocator.allocate(bytes);
    if (self.storage().nbytes()) memcpy(block.get(), self.storage().data(), self.storage().nbytes());
    self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(block));
    self.storage().unsafeGetStorageImpl()->set_nbytes(bytes);
  }
  if (self.sizes() == size) return self;
  info->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve && *format != c10::MemoryFormat::Contiguous)
    info->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* info = self.unsafeGetTensorImpl();
  info->set_storage_keep_dtype(std::move(storage));
  info->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size())
    info->set_sizes_and_strides(size, stride);
  else
    info->set_sizes_contiguous(size);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  int64_t length = storage.nbytes() / self.itemsize();
  return set_storage(self, std::move(storage), 0, {length}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_storage(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}

Tensor& set_empty(Tensor& self) {
  On scope(self.device().index());
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true), 0, {0}, {});
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("_local_scalar_dense", &item);
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_empty);
  library.impl("record_stream", &record_stream);
  // These would be made of other operators, but have kernels of their own on CUDA.
  const std::set<std::string> composed = {
      "aten::masked_fill_", "aten::native_layer_norm", "aten::native_layer_norm_backward"};
  for (auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    bool is_of_lists = begins(op.name, "aten::_foreach_") || begins(op.name, "aten::_amp_foreach");
    if (!composed.count(op.name) && (!is_of_lists || op.name == "aten::_foreach_mm")) continue;
    if (op.overload_name == "out" || op.overload_name.find("_out") != std::string::npos) continue;
    library.impl(
        c10::toString(op).substr(6).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY(simulated, library) {
  library.def("default_generator", [](int64_t device) { return default_generator(device); });
  // What a process group moves: no copies that the host would wait for.
  library.def("host_copy(Tensor tensor) -> Tensor");
  library.def("put(Tensor(a!) tensor, Tensor value) -> ()");
}

TORCH_LIBRARY_IMPL(simulated, CUDA, library) {
  library.impl("host_copy", [](const Tensor& tensor) {
    Inner quiet;
    return on_host(tensor).clone();
  });
  library.impl("put", [](const Tensor& tensor, const Tensor& value) {
    Inner quiet;
    on_host(tensor).copy_(value);
  });
}

}  // namespace

// --- C functions

extern "C" {

void simulated_start() {
  std::lock_guard<std::mutex> lock(mutex);
  counts.clear();
  is_counting = true;
}
void simulated_stop() { is_counting = false; }
const char* simulated_counts() {  // lines of "kind name number"
  static std::string text;
  std::lock_guard<std::mutex> lock(mutex);
  std::ostringstream lines;
  for (auto& [event, times] : counts) lines << event << "\t" << times << "\n";
  text = lines.str();
  return text.c_str();
}
void simulated_on_wait(void (*function)(const char*)) { on_wait = function; }
void simulated_may_wait(bool may) { may_wait = may; }
bool simulated_wait(const char* name) {  // whether that is allowed
  count("wait", name);
  if (is_counting && on_wait) on_wait(name);
  return may_wait;
}
int simulated_device() { return current_device; }
int simulated_set_device(int device) {  // the one before
  int before = current_device;
  if (device >= 0) current_device = device;
  return before;
}
int64_t simulated_live(int device) { return memories[device].live; }
int64_t simulated_peak(int device) { return memories[device].peak; }
int64_t simulated_reserved(int device) { return memories[device].reserved; }
void simulated_reset_peak(int device) { memories[device].peak = memories[device].live; }
int64_t simulated_limit(int device) { return memories[device].limit; }
void simulated_set_limit(int device, int64_t bytes) { memories[device].limit = bytes; }
}
