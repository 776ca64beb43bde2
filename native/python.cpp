// The short way of a call from Python: reads the operands, asks whether anybody stands between a call and its kernel,
// and runs it, all in one function of C. Everything that could make the kernels read beyond a tensor is checked here for
// every tensor of every call, against the call that was prepared.
//
// Python's functions are those of its stable interface, found in the process that loaded the library, and declared here
// so that no header of a Python version is needed; so it is with torch, whose plain C functions for compiled models read
// what a tensor says of itself. A tensor's handle there is the address of a word that holds `Tensor._cdata`.
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "halfulp.h"

extern "C" {
struct PyObject;
using Size = intptr_t;
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject* const*, Size);
  int flags;
  const char* doc;
};
#define PYTHON __attribute__((weak))  // the library loads where there is no Python, too
PYTHON void Py_IncRef(PyObject*);
PYTHON void Py_DecRef(PyObject*);
PYTHON PyObject* PyObject_Type(PyObject*);
PYTHON PyObject* PyObject_GetAttrString(PyObject*, const char*);
PYTHON void* PyType_GetSlot(PyObject*, int);
PYTHON int PyObject_SetAttr(PyObject*, PyObject*, PyObject*);
PYTHON PyObject* PyObject_Vectorcall(PyObject*, PyObject* const*, size_t, PyObject*);
PYTHON PyObject* PyObject_VectorcallMethod(PyObject*, PyObject* const*, size_t, PyObject*);
PYTHON int PyObject_RichCompareBool(PyObject*, PyObject*, int);
PYTHON int PyObject_IsTrue(PyObject*);
PYTHON void* PyLong_AsVoidPtr(PyObject*);
PYTHON long PyLong_AsLong(PyObject*);
PYTHON PyObject* PyLong_FromSize_t(size_t);
PYTHON PyObject* PyTuple_New(Size);
PYTHON Size PyTuple_Size(PyObject*);
PYTHON PyObject* PyTuple_GetItem(PyObject*, Size);  // borrowed
PYTHON int PyTuple_SetItem(PyObject*, Size, PyObject*);  // steals
PYTHON PyObject* PyUnicode_InternFromString(const char*);
PYTHON PyObject* PyErr_Occurred();
PYTHON void PyErr_SetString(PyObject*, const char*);
PYTHON extern PyObject *PyExc_MemoryError, *PyExc_ValueError;
PYTHON PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
PYTHON PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
PYTHON void* PyCapsule_GetPointer(PyObject*, const char*);
PYTHON void* PyEval_SaveThread();
PYTHON void PyEval_RestoreThread(void*);
}

namespace {

constexpr int kEqual = 2, kFastCall = 0x80, kGet = 54;  // Py_EQ, METH_FASTCALL, Py_tp_descr_get

// A reference that is ours to give back.
class Ref {
 public:
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(Ref&& other) : object_(other.object_) { other.object_ = nullptr; }
  Ref& operator=(Ref&&) = delete;
  ~Ref() {
    if (object_) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }
  void set(PyObject* object) {
    if (object_) Py_DecRef(object_);
    object_ = object;
  }
  PyObject* give() {
    PyObject* object = object_;
    object_ = nullptr;
    return object;
  }
  explicit operator bool() const { return object_; }

 private:
  PyObject* object_;
};

PyObject* new_reference(PyObject* object) {
  Py_IncRef(object);
  return object;
}

// An attribute of tensors, looked up once.
struct Attribute {
  PyObject* of;
  PyObject* (*get)(PyObject*, PyObject*, PyObject*);
  bool find(PyObject* type, const char* name) {
    of = PyObject_GetAttrString(type, name);
    get = of ? reinterpret_cast<decltype(get)>(PyType_GetSlot(Ref(PyObject_Type(of)).get(), kGet)) : nullptr;
    return get;
  }
  PyObject* operator()(PyObject* x) const { return get(of, x, nullptr); }
};

// What `halfulp_python` is given, kept as long as the process.
struct Python {
  PyObject *none, *no, *yes, *tensor, *parameter, *strided, *tuple, *empty_like, *threads, *last_run, *learned, *batched;
  PyObject *watchers;  // functions, none of which is true where nobody watches
  PyObject *is_neg, *contiguous, *name, *cpu;
  Attribute cdata, layout, requires_grad;
} python;

// torch/csrc/inductor/aoti_torch/c/shim.h; 0: done
struct Torch {
  int32_t (*get_data_ptr)(void*, void**);
  int32_t (*get_dim)(void*, int64_t*);
  int32_t (*get_sizes)(void*, int64_t**);
  int32_t (*get_strides)(void*, int64_t**);
  int32_t (*get_dtype)(void*, int32_t*);
  int32_t (*get_device_type)(void*, int32_t*);
  bool (*grad_mode_is_enabled)();
} torch;

struct Facts {
  int64_t dtype, dims, sizes[4], strides[4];
};
struct Operand {
  Facts facts;
  void* data;
};
bool operator==(const Facts& x, const Facts& y) { return std::memcmp(&x, &y, sizeof x) == 0; }
struct Key {
  Facts operands[3];
  int64_t threads;
  bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};

enum Answer { kFailed = -1, kNo = 0, kYes = 1 };

Answer truth(const Ref& answer) { return answer ? Answer(PyObject_IsTrue(answer.get())) : kFailed; }

Answer watched() {
  for (Size i = 0; i < PyTuple_Size(python.watchers); ++i) {
    const Answer answer = truth(Ref(PyObject_Vectorcall(PyTuple_GetItem(python.watchers, i), nullptr, 0, nullptr)));
    if (answer != kNo) return answer;
  }
  return kNo;
}

// What a tensor of numbers in this machine's memory says of itself; kNo where it is anything else. To be asked once
// nobody watches.
Answer read(PyObject* x, Operand& operand) {
  const Ref type(PyObject_Type(x));
  if (type.get() != python.tensor && type.get() != python.parameter) return kNo;
  const Ref address(python.cdata(x));
  if (!address) return kFailed;
  void* tensor = PyLong_AsVoidPtr(address.get());
  int32_t dtype, device;
  int64_t *sizes, *strides;
  Facts& facts = operand.facts;
  std::memset(&facts, 0, sizeof facts);
  if (torch.get_device_type(&tensor, &device) || device != 0) return kNo;
  const Ref layout(python.layout(x));
  if (!layout) return kFailed;
  if (layout.get() != python.strided) return kNo;
  const Answer negative = truth(Ref(PyObject_Vectorcall(python.is_neg, &x, 1, nullptr)));
  if (negative != kNo) return negative == kYes ? kNo : kFailed;
  if (torch.get_dim(&tensor, &facts.dims) || facts.dims > 4 || torch.get_dtype(&tensor, &dtype) ||
      torch.get_sizes(&tensor, &sizes) || torch.get_strides(&tensor, &strides) ||
      torch.get_data_ptr(&tensor, &operand.data) || !operand.data)
    return kNo;
  facts.dtype = dtype;
  for (int64_t i = 0; i < facts.dims; ++i) facts.sizes[i] = sizes[i], facts.strides[i] = strides[i];
  return kYes;
}

// A call made ready: the structure that wants pointers alone, and one element of each result, as wide as all of it,
// which `empty_like` makes a contiguous tensor of.
enum Blank { kOut, kLse, kKept, kGradQuery, kGradKey, kGradValue, kBlanks };
struct Known {
  halfulp_call call;
  Key key;
  Facts made[kBlanks];  // of the results
  PyObject *options, *arguments, *blanks;
};
const char* const kCapsule = "halfulp.Known";

Known* known_of(PyObject* capsule) { return static_cast<Known*>(PyCapsule_GetPointer(capsule, kCapsule)); }

PyObject* blank(const Known& known, Blank which) {
  PyObject* like = PyTuple_GetItem(known.blanks, which);
  return PyObject_Vectorcall(python.empty_like, &like, 1, nullptr);
}

// Where a new tensor's numbers are.
void* data_of(const Ref& x) {
  const Ref address(python.cdata(x.get()));
  if (!address) return nullptr;
  void *tensor = PyLong_AsVoidPtr(address.get()), *data = nullptr;
  return torch.get_data_ptr(&tensor, &data) ? nullptr : data;
}

// --- the calls that are known

std::mutex lock;
std::unordered_multimap<uint64_t, PyObject*> table;

uint64_t hash_of(const Key& key) {
  uint64_t words[sizeof key / 8], hash = 0;
  std::memcpy(words, &key, sizeof key);
  for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29;
  return hash;
}

// Options are numbers, names and tuples of them of Python's own types: to compare them runs nothing of anybody's.
bool same(PyObject* x, PyObject* y) {
  if (x == y) return true;
  const Ref type(PyObject_Type(x)), other(PyObject_Type(y));
  if (type.get() != other.get()) return false;
  if (type.get() != python.tuple) return PyObject_RichCompareBool(x, y, kEqual) == 1;
  const Size count = PyTuple_Size(x);
  if (count != PyTuple_Size(y)) return false;
  for (Size i = 0; i < count; ++i)
    if (!same(PyTuple_GetItem(x, i), PyTuple_GetItem(y, i))) return false;
  return true;
}

bool same_options(const Known& known, PyObject* const* options, Size count) {
  for (Size i = 0; i < count; ++i)
    if (!same(PyTuple_GetItem(known.options, i), options[i])) return false;
  return PyTuple_Size(known.options) == count;
}

Ref find(const Key& key, PyObject* const* options, Size count) {
  const std::lock_guard<std::mutex> held(lock);
  const auto range = table.equal_range(hash_of(key));
  for (auto at = range.first; at != range.second; ++at) {
    const Known& known = *known_of(at->second);
    if (known.key == key && same_options(known, options, count)) return Ref(new_reference(at->second));
  }
  return Ref(nullptr);
}

void forget(PyObject* capsule) {
  Known* known = known_of(capsule);
  Py_DecRef(known->options), Py_DecRef(known->arguments), Py_DecRef(known->blanks);
  delete known;
}

// Query, key and value of a call; kNo where they are no plain tensors.
Answer read_key(PyObject* const* given, Key& key, void** data) {
  std::memset(&key, 0, sizeof key);
  for (int i = 0; i < 3; ++i) {
    Operand operand;
    const Answer answer = read(given[i], operand);
    if (answer != kYes) return answer;
    key.operands[i] = operand.facts;
    data[i] = operand.data;
  }
  const Ref threads(PyObject_Vectorcall(python.threads, nullptr, 0, nullptr));
  if (!threads) return kFailed;
  key.threads = PyLong_AsLong(threads.get());
  return kYes;
}

bool is(const Facts& x, int64_t batch, int64_t heads, int64_t rows, int64_t width, const halfulp_tensor& as) {
  return x.dims == 4 && x.sizes[0] == batch && x.sizes[1] == heads && x.sizes[2] == rows && x.sizes[3] == width &&
         x.strides[0] == as.batch && x.strides[1] == as.head && x.strides[2] == as.row &&
         (x.strides[3] == 1 || width == 1);
}

bool same_operands(const Key& x, const Key& y) { return std::memcmp(x.operands, y.operands, sizeof x.operands) == 0; }

bool same_sizes(const Facts& x, const Facts& y) {
  return x.dtype == y.dtype && x.dims == y.dims && std::memcmp(x.sizes, y.sizes, sizeof x.sizes) == 0;
}

int64_t rows_of(const halfulp_call& call) { return call.batch * call.heads * call.n_query; }

// The parts of what is kept: three floats a row, and a residual where the recipe has one.
void keep(const Known& known, halfulp_call& call, void* kept) {
  float* at = static_cast<float*>(kept);
  const int64_t rows = rows_of(call);
  call.row_max = at, call.row_sum = at + rows, call.own_lse = at + 2 * rows;
  const bool residual = known.made[kKept].sizes[0] > 12 * rows;
  call.residual = residual ? reinterpret_cast<int8_t*>(at + 3 * rows) : nullptr;
}

constexpr double kShortest = 1 << 18;  // products

PyObject* run(int32_t (*kernel)(const halfulp_call*), const halfulp_call& call, Ref* made, Size count) {
  // others may run meanwhile, unless that takes longer than the call
  const double pairs = double(call.batch * call.heads) * double(call.n_query) * double(call.n_key);
  void* thread = pairs * double(call.d + call.dv) > kShortest ? PyEval_SaveThread() : nullptr;
  const int32_t failed = kernel(&call);
  if (thread) PyEval_RestoreThread(thread);
  if (failed) {
    PyErr_SetString(PyExc_MemoryError, "halfulp.attention: no memory for the kernel's own tiles");
    return nullptr;
  }
  if (count == 1) return made[0].give();
  PyObject* tuple = PyTuple_New(count);
  for (Size i = 0; tuple && i < count; ++i)
    PyTuple_SetItem(tuple, i, made[i] ? made[i].give() : new_reference(python.none));
  return tuple;
}

// O; with lse if wanted; with both and what the backward pass needs if kept.
PyObject* compute(const Known& known, void* const* data, bool wants_lse, bool keeps) {
  halfulp_call call = known.call;
  Ref made[3] = {Ref(blank(known, kOut)), Ref(nullptr), Ref(nullptr)};
  if (!made[0]) return nullptr;
  call.query.data = data[0], call.key.data = data[1], call.value.data = data[2], call.out.data = data_of(made[0]);
  if (wants_lse) {
    made[1].set(blank(known, kLse));
    if (!made[1]) return nullptr;
    call.lse = static_cast<float*>(data_of(made[1]));
  }
  if (keeps) {
    made[2].set(blank(known, kKept));
    if (!made[2]) return nullptr;
    keep(known, call, data_of(made[2]));
  }
  return run(halfulp_forward, call, made, keeps ? 3 : wants_lse ? 2 : 1);
}

// --- what Python calls

// attend(query, key, value, return_lse, *options): the result; None for a call that may be learned, False for one that
// goes the operator's way.
PyObject* attend(PyObject*, PyObject* const* given, Size count) {
  Key key;
  void* data[3];
  Answer answer = watched();
  if (answer == kNo) answer = read_key(given, key, data);
  else if (answer == kYes) answer = kNo;
  if (answer != kYes) return answer == kNo ? new_reference(python.no) : nullptr;
  const Ref found = find(key, given + 4, count - 4);
  if (!found) return PyErr_Occurred() ? nullptr : new_reference(python.none);
  const Known& known = *known_of(found.get());
  if (PyTuple_Size(known.blanks) != kBlanks) return new_reference(python.no);
  if (PyObject_SetAttr(python.last_run, python.name, python.cpu)) return nullptr;
  if (torch.grad_mode_is_enabled())
    for (int i = 0; i < 3; ++i) {
      answer = truth(Ref(python.requires_grad(given[i])));
      if (answer == kFailed) return nullptr;
      if (answer == kNo) continue;
      PyObject* arguments[] = {given[0], given[1], given[2], given[3], found.get(), known.arguments};
      return PyObject_Vectorcall(python.learned, arguments, 6, nullptr);
    }
  return compute(known, data, PyObject_IsTrue(given[3]) == 1, false);
}

// Where the results lie within themselves; whether they are as large as the kernels take them to be.
bool take_results(Known& known, const Key& key) {
  halfulp_call& c = known.call;
  const std::pair<Blank, halfulp_tensor*> tensors[] = {
      {kOut, &c.out}, {kGradQuery, &c.grad_query}, {kGradKey, &c.grad_key}, {kGradValue, &c.grad_value}};
  for (const auto& [which, tensor] : tensors) {
    const int64_t* strides = known.made[which].strides;
    *tensor = {nullptr, strides[0], strides[1], strides[2]};
    if (known.made[which].dtype != key.operands[0].dtype) return false;
  }
  const Facts *made = known.made, &lse = made[kLse], &kept = made[kKept];
  return is(made[kOut], c.batch, c.heads, c.n_query, c.dv, c.out) &&
         is(made[kGradQuery], c.batch, c.heads, c.n_query, c.d, c.grad_query) &&
         is(made[kGradKey], c.batch, c.key_heads, c.n_key, c.d, c.grad_key) &&
         is(made[kGradValue], c.batch, c.key_heads, c.n_key, c.dv, c.grad_value) && lse.dims == 3 &&
         lse.sizes[0] == c.batch && lse.sizes[1] == c.heads && lse.sizes[2] == c.n_query && kept.dims == 1 &&
         (kept.sizes[0] == 12 * rows_of(c) || kept.sizes[0] == (12 + c.dv) * rows_of(c));
}

// learn(query, key, value, options, most, address, blanks, arguments): how many calls are known now. `address` is that of the
// call's structure, 0 where calls like it go the operator's way, as do those whose operands are not what it says.
PyObject* learn(PyObject*, PyObject* const* given, Size) {
  Key key;
  void* data[3];
  const Answer answer = read_key(given, key, data);
  if (answer != kYes) return answer == kNo ? new_reference(python.no) : nullptr;
  const long most = PyLong_AsLong(given[4]);
  const auto* call = static_cast<const halfulp_call*>(PyLong_AsVoidPtr(given[5]));
  if (PyErr_Occurred()) return nullptr;
  const Ref nothing(PyTuple_New(0));
  std::unique_ptr<Known> known(new (std::nothrow) Known{});
  if (!known) return new_reference(python.none);
  if (call) known->call = *call;
  const halfulp_call& c = known->call;
  bool fits = call && is(key.operands[0], c.batch, c.heads, c.n_query, c.d, c.query) && c.query.data == data[0] &&
              is(key.operands[1], c.batch, c.key_heads, c.n_key, c.d, c.key) && c.key.data == data[1] &&
              is(key.operands[2], c.batch, c.key_heads, c.n_key, c.dv, c.value) && c.value.data == data[2];
  for (int i = 0; fits && i < kBlanks; ++i) {
    Operand made;
    PyObject* like = PyTuple_GetItem(given[6], i);
    const Ref one(PyObject_Vectorcall(python.empty_like, &like, 1, nullptr));
    fits = one && read(one.get(), made) == kYes;
    known->made[i] = made.facts;
  }
  fits = fits && take_results(*known, key);
  if (PyErr_Occurred()) return nullptr;
  known->key = key;
  known->options = new_reference(given[3]);
  known->arguments = new_reference(given[7]);
  known->blanks = new_reference(fits ? given[6] : nothing.get());
  Ref capsule(PyCapsule_New(known.release(), kCapsule, forget));
  if (!capsule) return nullptr;
  decltype(table) old;
  size_t count = 0;
  try {
    const std::lock_guard<std::mutex> held(lock);
    if (long(table.size()) >= most) old.swap(table);  // as in a loop over lengths
    table.emplace(hash_of(key), capsule.get());
    capsule.give();
    count = table.size();
  } catch (const std::bad_alloc&) {  // it is not known, then
  }
  for (const auto& entry : old) Py_DecRef(entry.second);
  return PyLong_FromSize_t(count);
}

// forward(known, query, key, value, return_lse): O, lse or None, and what `backward` wants kept.
PyObject* forward(PyObject*, PyObject* const* given, Size) {
  const Known* known = known_of(given[0]);
  Key key;
  void* data[3];
  if (!known) return nullptr;
  const Answer answer = read_key(given + 1, key, data);
  if (answer == kYes && same_operands(key, known->key))
    return compute(*known, data, PyObject_IsTrue(given[4]) == 1, true);
  if (answer != kFailed) PyErr_SetString(PyExc_ValueError, "halfulp.attention: a tensor changed while it was called");
  return nullptr;
}

// A gradient of what was made, with neighbors in its last dimension, or in all; it may be copied for that.
Answer read_gradient(Ref& x, const Facts& made, bool whole, Operand& operand) {
  PyObject* given = x.get();
  Answer answer = truth(Ref(PyObject_Vectorcall(python.batched, &given, 1, nullptr)));
  if (answer != kNo) return answer == kYes ? kNo : kFailed;
  answer = read(given, operand);
  if (answer != kYes) return answer;
  if (!same_sizes(operand.facts, made)) return kNo;
  if (whole ? operand.facts == made : operand.facts.strides[3] == 1) return kYes;
  x.set(PyObject_VectorcallMethod(python.contiguous, &given, 1, nullptr));
  return x ? read(x.get(), operand) : kFailed;
}

// backward(known, query, key, value, out, kept, grad_out, grad_lse): dQ, dK and dV; None where the operator must do it:
// somebody watches, or hooks gave other tensors than were saved.
PyObject* backward(PyObject*, PyObject* const* given, Size) {
  const Known* known = known_of(given[0]);
  if (!known) return nullptr;
  Key key;
  void* data[3];
  Operand out, kept, grad_out, grad_lse;
  Ref of_out(new_reference(given[6])), of_lse(new_reference(given[7]));
  const bool has_lse = given[7] != python.none;
  Answer answer = torch.grad_mode_is_enabled() ? kYes : watched();
  if (answer == kYes) return new_reference(python.none);
  if (answer == kNo) answer = read_key(given + 1, key, data);
  if (answer == kYes) answer = read(given[4], out);
  if (answer == kYes) answer = read(given[5], kept);
  if (answer == kYes) answer = read_gradient(of_out, known->made[kOut], false, grad_out);
  if (answer == kYes && has_lse) answer = read_gradient(of_lse, known->made[kLse], true, grad_lse);
  if (answer == kFailed) return nullptr;
  if (answer == kNo || !same_operands(key, known->key) || !(out.facts == known->made[kOut]) ||
      !(kept.facts == known->made[kKept]))
    return new_reference(python.none);
  halfulp_call call = known->call;
  call.query.data = data[0], call.key.data = data[1], call.value.data = data[2], call.out.data = out.data;
  const int64_t* strides = grad_out.facts.strides;
  call.grad_out = {grad_out.data, strides[0], strides[1], strides[2]};
  call.grad_lse = has_lse ? static_cast<const float*>(grad_lse.data) : nullptr;
  keep(*known, call, kept.data);
  Ref made[3] = {Ref(blank(*known, kGradQuery)), Ref(blank(*known, kGradKey)), Ref(blank(*known, kGradValue))};
  if (!made[0] || !made[1] || !made[2]) return nullptr;
  call.grad_query.data = data_of(made[0]), call.grad_key.data = data_of(made[1]);
  call.grad_value.data = data_of(made[2]);
  return run(halfulp_backward, call, made, 3);
}

// plain(*tensors): whether each is a plain tensor, or None, and nobody watches.
PyObject* plain(PyObject*, PyObject* const* given, Size count) {
  Answer answer = watched();
  bool all = answer == kNo;
  for (Size i = 0; all && i < count; ++i) {
    if (given[i] == python.none) continue;
    Operand operand;
    answer = read(given[i], operand);
    all = answer == kYes;
  }
  return answer == kFailed ? nullptr : new_reference(all ? python.yes : python.no);
}

PyMethodDef methods[] = {{"plain", plain, kFastCall, nullptr},
                         {"attend", attend, kFastCall, nullptr},
                         {"learn", learn, kFastCall, nullptr},
                         {"forward", forward, kFastCall, nullptr},
                         {"backward", backward, kFastCall, nullptr}};

template <class Function>
bool load(void* library, const char* name, Function& function) {
  return (function = reinterpret_cast<Function>(dlsym(library, name)));
}

}  // namespace

extern "C" {

// The functions above as Python has them, given what they use of Python and torch (in the order of `Python`) and the
// file that torch's functions are reached through; null where something that they need is missing.
HALFULP_API PyObject* halfulp_python(PyObject* objects, const char* file) {
  void* library = dlopen(file, RTLD_LAZY);
  if (!PyObject_Vectorcall || !PyObject_VectorcallMethod || !library ||
      !load(library, "aoti_torch_get_data_ptr", torch.get_data_ptr) ||
      !load(library, "aoti_torch_get_dim", torch.get_dim) ||
      !load(library, "aoti_torch_get_sizes", torch.get_sizes) ||
      !load(library, "aoti_torch_get_strides", torch.get_strides) ||
      !load(library, "aoti_torch_get_dtype", torch.get_dtype) ||
      !load(library, "aoti_torch_get_device_type", torch.get_device_type) ||
      !load(library, "aoti_torch_grad_mode_is_enabled", torch.grad_mode_is_enabled))
    return nullptr;
  Py_IncRef(objects);  // for ever
  Size at = 0;
  for (PyObject** object : {&python.none, &python.no, &python.yes, &python.tensor, &python.parameter, &python.strided, &python.tuple,
                            &python.empty_like, &python.threads, &python.last_run, &python.learned, &python.batched,
                            &python.watchers})
    *object = PyTuple_GetItem(objects, at++);
  python.is_neg = PyObject_GetAttrString(python.tensor, "is_neg");
  if (!python.is_neg || !python.cdata.find(python.tensor, "_cdata") || !python.layout.find(python.tensor, "layout") ||
      !python.requires_grad.find(python.tensor, "requires_grad"))
    return nullptr;
  python.contiguous = PyUnicode_InternFromString("contiguous");
  python.name = PyUnicode_InternFromString("name");
  python.cpu = PyUnicode_InternFromString("cpu");
  PyObject* functions = PyTuple_New(5);
  for (Size i = 0; functions && i < 5; ++i)
    PyTuple_SetItem(functions, i, PyCFunction_NewEx(&methods[i], nullptr, nullptr));
  return PyErr_Occurred() ? nullptr : functions;
}

}  // extern "C"
