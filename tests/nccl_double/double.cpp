// A stand-in for libnccl.so.2 that moves host memory between processes of one host.
//
// It has the functions that CuPy's binding imports, and streams and events of its own:
// each stream is a thread that works off a queue, stream 0 runs at once. Ranks meet in
// a segment of shared memory named by the unique id, and read each other's buffers.
//
// What it does that NCCL does not, for tests:
//   * ranks that post unlike collectives get an error, and a line that names both posts
//     (NCCL hangs, or gives garbage);
//   * a rank that waits longer than NCCL_DOUBLE_TIMEOUT seconds gets an error;
//   * on a stream, an output is 0xff in every byte until the work has run, so that a
//     missing wait shows;
//   * NCCL_DOUBLE_LOG names a file prefix; each rank writes what it posts there.
//
// Reductions fold in rank order, one rounding per step in the buffer's own type.

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

namespace {

enum Result { OK, CUDA_ERROR, SYSTEM_ERROR, INTERNAL, BAD_ARGUMENT, BAD_USE, REMOTE };
enum Kind { NONE, ALL_REDUCE, REDUCE, BROADCAST, REDUCE_SCATTER, ALL_GATHER, SEND, RECV };
enum Op { SUM, PROD, MAX, MIN, AVG };
const char* const KIND_NAMES[] = {"nothing",       "allReduce", "reduce", "broadcast",
                                  "reduceScatter", "allGather", "send",   "recv"};

const int MAX_RANKS = 16;
const int MAX_OPS = 1024;  // of one group

struct Post {
  int kind, dtype, op, root;  // root: the peer of a send or a receive
  size_t count;
  uint64_t send, recv;
};

enum MailState { EMPTY, SENT, TAKEN, REFUSED };
struct Mail {  // from one rank to another
  std::atomic<int> state;
  Post post;
};

struct Slot {
  std::atomic<int> pid;
  int ops;
  Post op[MAX_OPS];
};

struct Shared {
  std::atomic<int> arrived, sense, error;
  Slot slot[MAX_RANKS];
  Mail mail[MAX_RANKS][MAX_RANKS];
};

size_t width_of(int dtype) {
  //                    i8 u8 i32 u32 i64 u64 f16 f32 f64 bf16 e4m3 e5m2
  const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return dtype >= 0 && dtype < 12 ? widths[dtype] : 0;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

double timeout() {
  const char* given = getenv("NCCL_DOUBLE_TIMEOUT");
  return given ? atof(given) : 30;
}

// ------------------------------------------------------------------ one communicator
struct Comm {
  Shared* shared;
  int rank, size, sense = 0;
  std::string name;
  std::mutex lock;  // work runs in the order of its posts, whatever its streams
  std::condition_variable turn;
  long posted = 0, done = 0;
};

Result fail(Comm* comm, Result why) {
  int none = OK;
  comm->shared->error.compare_exchange_strong(none, why);
  return why;
}

// Waits between two looks: short at first, so that idle ranks leave their core soon.
struct Patience {
  double start = now();
  int looks = 0;
  bool exhausted() {
    if (++looks < 50) return false;
    if (looks < 500) sched_yield();
    else usleep(50);
    return (looks & 63) == 0 && now() - start > timeout();
  }
};

Result barrier(Comm* comm, const char* where) {
  Shared* s = comm->shared;
  comm->sense ^= 1;
  if (s->arrived.fetch_add(1) + 1 == comm->size) {
    s->arrived = 0;
    s->sense = comm->sense;
  } else {
    Patience patience;
    while (s->sense != comm->sense) {
      if (s->error) return REMOTE;
      if (patience.exhausted()) {
        fprintf(stderr, "nccl double: rank %d of %d waited %g s for its peers in %s\n",
                comm->rank, comm->size, timeout(), where);
        return fail(comm, REMOTE);
      }
    }
  }
  return s->error ? REMOTE : OK;
}

bool read_peer(Comm* comm, int rank, uint64_t source, void* target, size_t bytes) {
  pid_t pid = comm->shared->slot[rank].pid;
  if (pid == getpid()) {
    memmove(target, reinterpret_cast<void*>(source), bytes);
    return true;
  }
  for (size_t done = 0; done < bytes;) {
    iovec local{static_cast<char*>(target) + done, bytes - done};
    iovec remote{reinterpret_cast<char*>(source) + done, bytes - done};
    ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got <= 0) {
      perror("nccl double: process_vm_readv");
      return false;
    }
    done += got;
  }
  return true;
}

// ----------------------------------------------------------------------- reductions
float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

struct BFloat16 {
  uint16_t bits;
  operator float() const { return bits_to_float(uint32_t(bits) << 16); }
  BFloat16(float x) {
    uint32_t u = float_to_bits(x);
    bits = std::isnan(x) ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
};

struct Float16 {
  uint16_t bits;
  operator float() const { return to_float(bits); }
  static float to_float(uint16_t h) {
    int sign = h >> 15, exponent = (h >> 10) & 31, mantissa = h & 1023;
    float x = exponent == 31   ? (mantissa ? NAN : INFINITY)
              : exponent == 0 ? std::ldexp(float(mantissa), -24)
                              : std::ldexp(float(mantissa + 1024), exponent - 25);
    return sign ? -x : x;
  }
  Float16(float x) {
    uint16_t sign = float_to_bits(x) >> 31 << 15;
    float a = std::fabs(x);
    if (std::isnan(x)) bits = sign | 0x7e00;
    else if (a == 0) bits = sign;
    else if (a >= 65520) bits = sign | 0x7c00;
    else {
      int exponent = 0;
      std::frexp(a, &exponent);
      // The spacing of halfs around a; rint rounds ties to even.
      int scale = std::max(exponent - 11, -24);
      uint32_t steps = std::rint(std::ldexp(a, -scale));
      bits = sign | (scale == -24 ? steps : ((scale + 24) << 10) + steps);
    }
  }
};

template <typename T>
T fold(T a, T b, int op) {
  switch (op) {
    case PROD: return T(a * b);
    // As NCCL: of a NaN and a number, the number.
    case MAX: return std::isnan(double(a)) ? b : std::isnan(double(b)) || a > b ? a : b;
    case MIN: return std::isnan(double(a)) ? b : std::isnan(double(b)) || a < b ? a : b;
    default: return T(a + b);
  }
}

template <typename T>
void fold_all(char* into, const char* from, size_t count, int op) {
  T* a = reinterpret_cast<T*>(into);
  const T* b = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < count; i++) a[i] = fold<T>(a[i], b[i], op);
}

template <typename T>
void divide_all(char* data, size_t count, int by) {
  T* a = reinterpret_cast<T*>(data);
  for (size_t i = 0; i < count; i++) a[i] = T(a[i] / by);
}

#define BY_TYPE(function, dtype, ...)                                   \
  switch (dtype) {                                                      \
    case 0: function<int8_t>(__VA_ARGS__); break;                       \
    case 1: function<uint8_t>(__VA_ARGS__); break;                      \
    case 2: function<int32_t>(__VA_ARGS__); break;                      \
    case 3: function<uint32_t>(__VA_ARGS__); break;                     \
    case 4: function<int64_t>(__VA_ARGS__); break;                      \
    case 5: function<uint64_t>(__VA_ARGS__); break;                     \
    case 6: function<Float16>(__VA_ARGS__); break;                      \
    case 7: function<float>(__VA_ARGS__); break;                        \
    case 8: function<double>(__VA_ARGS__); break;                       \
    case 9: function<BFloat16>(__VA_ARGS__); break;                     \
  }

// ---------------------------------------------------------------- running one group
std::string spell(int rank, const Post& p) {
  char text[160];
  snprintf(text, sizeof text, "rank %d %s count %zu dtype %d op %d root %d", rank,
           KIND_NAMES[p.kind], p.count, p.dtype, p.op, p.root);
  return text;
}

bool alike(const Post& a, const Post& b) {
  return a.kind == b.kind && a.count == b.count && a.dtype == b.dtype && a.op == b.op &&
         a.root == b.root;
}

Result collect(Comm* comm, int index, std::vector<char>& out) {
  Shared* s = comm->shared;
  const Post& mine = s->slot[comm->rank].op[index];
  size_t bytes = mine.count * width_of(mine.dtype);
  auto source = [&](int rank) { return s->slot[rank].op[index].send; };
  if (mine.kind == BROADCAST) {
    out.resize(bytes);
    return read_peer(comm, mine.root, source(mine.root), out.data(), bytes)
               ? OK : SYSTEM_ERROR;
  }
  if (mine.kind == ALL_GATHER) {
    out.resize(bytes * comm->size);
    for (int r = 0; r < comm->size; r++)
      if (!read_peer(comm, r, source(r), out.data() + r * bytes, bytes))
        return SYSTEM_ERROR;
    return OK;
  }
  if (mine.kind == REDUCE && mine.root != comm->rank) return OK;
  size_t offset = mine.kind == REDUCE_SCATTER ? comm->rank * bytes : 0;
  std::vector<char> next(bytes);
  out.resize(bytes);
  for (int r = 0; r < comm->size; r++) {
    char* target = r ? next.data() : out.data();
    if (!read_peer(comm, r, source(r) + offset, target, bytes)) return SYSTEM_ERROR;
    if (r) BY_TYPE(fold_all, mine.dtype, out.data(), next.data(), mine.count, mine.op);
  }
  if (mine.op == AVG) BY_TYPE(divide_all, mine.dtype, out.data(), mine.count, comm->size);
  return OK;
}

Result run_collectives(Comm* comm, const std::vector<Post>& posts) {
  Shared* s = comm->shared;
  Slot& me = s->slot[comm->rank];
  me.ops = posts.size();
  std::copy(posts.begin(), posts.end(), me.op);
  Result result = barrier(comm, spell(comm->rank, posts[0]).c_str());
  if (result) return result;
  for (int r = 0; r < comm->size; r++) {
    Slot& other = s->slot[r];
    for (int i = 0; i < std::max(me.ops, other.ops); i++) {
      Post nothing{};
      const Post& a = i < me.ops ? me.op[i] : nothing;
      const Post& b = i < other.ops ? other.op[i] : nothing;
      if (alike(a, b)) continue;
      fprintf(stderr, "nccl double: mismatch: %s, but %s\n",
              spell(comm->rank, a).c_str(), spell(r, b).c_str());
      return fail(comm, BAD_USE);
    }
  }
  std::vector<std::vector<char>> out(posts.size());
  for (size_t i = 0; i < posts.size() && !result; i++) result = collect(comm, i, out[i]);
  if (result) return fail(comm, result);
  // All have read before any writes: buffers may be used in place.
  result = barrier(comm, "the end of a collective");
  for (size_t i = 0; i < posts.size() && !result; i++)
    if (out[i].size())
      memcpy(reinterpret_cast<void*>(posts[i].recv), out[i].data(), out[i].size());
  return result;
}

// Sends and receives of a group make progress together; only the two ranks of a pair
// take part, and the messages of a pair keep their order.
Result run_messages(Comm* comm, const std::vector<Post>& posts) {
  Shared* s = comm->shared;
  std::vector<int> phase(posts.size(), 0);  // 0 to do, 1 sent, 2 done
  size_t done = 0;
  Patience patience;
  while (done < posts.size()) {
    std::vector<bool> busy[2];
    busy[0].resize(comm->size);
    busy[1].resize(comm->size);
    for (size_t i = 0; i < posts.size(); i++) {
      const Post& p = posts[i];
      bool receives = p.kind == RECV;
      if (phase[i] == 2 || busy[receives][p.root]) continue;
      busy[receives][p.root] = true;
      Mail& mail = receives ? s->mail[p.root][comm->rank] : s->mail[comm->rank][p.root];
      if (receives && mail.state == SENT) {
        const Post& sent = mail.post;
        if (sent.count != p.count || sent.dtype != p.dtype) {
          fprintf(stderr, "nccl double: mismatch: %s, but %s\n",
                  spell(comm->rank, p).c_str(), spell(p.root, sent).c_str());
          return fail(comm, BAD_USE);
        }
        size_t bytes = p.count * width_of(p.dtype);
        if (!read_peer(comm, p.root, sent.send, reinterpret_cast<void*>(p.recv), bytes))
          return fail(comm, SYSTEM_ERROR);
        mail.state = TAKEN;
        phase[i] = 2, done++;
        patience = Patience();
      } else if (!receives && phase[i] == 0 && mail.state == EMPTY) {
        mail.post = p;
        mail.state = SENT;
        phase[i] = 1;
      } else if (!receives && phase[i] == 1 && mail.state == TAKEN) {
        mail.state = EMPTY;
        phase[i] = 2, done++;
        patience = Patience();
      }
    }
    if (s->error) return REMOTE;
    if (patience.exhausted()) {
      size_t i = 0;
      while (phase[i] == 2) i++;
      fprintf(stderr, "nccl double: rank %d of %d waited %g s for its peer in %s\n",
              comm->rank, comm->size, timeout(), spell(comm->rank, posts[i]).c_str());
      return fail(comm, REMOTE);
    }
  }
  return OK;
}

Result run_group(Comm* comm, const std::vector<Post>& posts, long ticket) {
  {
    std::unique_lock<std::mutex> hold(comm->lock);
    comm->turn.wait(hold, [&] { return comm->done == ticket; });
  }
  std::vector<Post> collectives, messages;
  for (const Post& p : posts) (p.kind >= SEND ? messages : collectives).push_back(p);
  Result result = comm->shared->error ? REMOTE : OK;
  if (!result && collectives.size()) result = run_collectives(comm, collectives);
  if (!result && messages.size()) result = run_messages(comm, messages);
  std::lock_guard<std::mutex> hold(comm->lock);
  comm->done++;
  comm->turn.notify_all();
  return result;
}

// -------------------------------------------------------------------------- streams
struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  Stream() {
    std::thread([this] {
      for (;;) {
        std::function<void()> next;
        {
          std::unique_lock<std::mutex> hold(lock);
          changed.wait(hold, [this] { return !queue.empty(); });
          next = queue.front();
        }
        next();
        std::lock_guard<std::mutex> hold(lock);
        queue.pop_front();
        changed.notify_all();
      }
    }).detach();
  }
  void put(std::function<void()> work) {
    std::lock_guard<std::mutex> hold(lock);
    queue.push_back(std::move(work));
    changed.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [this] { return queue.empty(); });
  }
};

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  bool passed = false;
  void pass() {
    std::lock_guard<std::mutex> hold(lock);
    passed = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [this] { return passed; });
  }
};

std::mutex streams_lock;
std::map<intptr_t, Stream*> streams;
std::map<intptr_t, std::shared_ptr<Event>> events;
intptr_t last_name = 0;

Stream* stream_of(intptr_t name) {  // null for stream 0, which runs at once
  if (!name) return nullptr;
  std::lock_guard<std::mutex> hold(streams_lock);
  Stream*& found = streams[name];
  if (!found) found = new Stream;
  return found;
}

std::shared_ptr<Event> event_of(intptr_t name) {
  std::lock_guard<std::mutex> hold(streams_lock);
  return events[name];
}

// --------------------------------------------------------------------------- posting
struct Queued {
  Comm* comm;
  Post post;
  intptr_t stream;
};
thread_local std::vector<Queued> group;
thread_local int depth = 0;

void spoil(const Comm* comm, const Post& p) {
  if (p.kind == SEND || (p.kind == REDUCE && p.root != comm->rank)) return;
  size_t bytes = p.count * width_of(p.dtype);
  size_t written = p.kind == ALL_GATHER ? bytes * comm->size : bytes;
  size_t read = p.kind == REDUCE_SCATTER ? bytes * comm->size : bytes;
  bool apart = p.kind == RECV || p.recv + written <= p.send || p.send + read <= p.recv;
  if (apart) memset(reinterpret_cast<void*>(p.recv), 0xff, written);
}

Result flush() {
  std::vector<Queued> all;
  all.swap(group);
  Result result = OK;
  while (!all.empty()) {  // one round per communicator, in the order of first use
    Comm* comm = all[0].comm;
    intptr_t name = all[0].stream;
    std::vector<Post> posts;
    std::vector<Queued> rest;
    for (Queued& q : all) {
      if (q.comm == comm) posts.push_back(q.post);
      else rest.push_back(q);
      if (q.comm == comm && q.stream != name) return BAD_USE;
    }
    all.swap(rest);
    if (posts.size() > MAX_OPS) return BAD_ARGUMENT;
    long ticket = comm->posted++;
    Stream* stream = stream_of(name);
    if (stream) {
      for (const Post& p : posts) spoil(comm, p);
      stream->put([=] {
        const char* delay = getenv("NCCL_DOUBLE_DELAY_US");
        usleep(delay ? atoi(delay) : 2000);
        run_group(comm, posts, ticket);
      });
    } else if (Result now = run_group(comm, posts, ticket)) {
      result = now;
    }
  }
  return result;
}

void write_log(const Comm* comm, const Post& p) {
  const char* prefix = getenv("NCCL_DOUBLE_LOG");
  if (!prefix) return;
  std::string path = std::string(prefix) + "." + std::to_string(comm->rank);
  if (FILE* file = fopen(path.c_str(), "a")) {
    fprintf(file, "%s\n", spell(comm->rank, p).c_str());
    fclose(file);
  }
}

Result post(Comm* comm, Post p, intptr_t stream) {
  if (!comm || !width_of(p.dtype) || p.op < SUM || p.op > AVG) return BAD_ARGUMENT;
  bool folds = p.kind == ALL_REDUCE || p.kind == REDUCE || p.kind == REDUCE_SCATTER;
  if (folds && p.dtype > 9) return BAD_ARGUMENT;
  if (p.root < 0 || p.root >= comm->size) return BAD_ARGUMENT;
  if (p.count && !(p.kind == SEND ? p.send : p.kind == REDUCE ? p.send : p.recv))
    return BAD_ARGUMENT;
  if (comm->shared->error) return REMOTE;
  write_log(comm, p);
  group.push_back({comm, p, stream});
  return depth ? OK : flush();
}

Comm* attach(const std::string& name, int size, int rank) {
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // peers read this process's memory
  int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (!ftruncate(file, sizeof(Shared)))
    memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  Comm* comm = new Comm;
  comm->shared = static_cast<Shared*>(memory);
  comm->rank = rank;
  comm->size = size;
  comm->name = name;
  comm->shared->slot[rank].pid = getpid();
  return comm;
}

}  // namespace

extern "C" {
// ------------------------------------------------------------------- NCCL's functions
struct UniqueId {
  char text[128];
};

const char* ncclGetErrorString(int result) {
  const char* const texts[] = {
      "no error",         "unhandled cuda error", "unhandled system error",
      "internal error",   "invalid argument",     "invalid usage",
      "remote process exited or there was a network error"};
  return result >= 0 && result < 7 ? texts[result] : "unknown";
}

int ncclGetVersion(int* version) {
  *version = 22803;
  return OK;
}

int ncclGetUniqueId(UniqueId* id) {
  static std::atomic<int> number{0};
  memset(id, 0, sizeof *id);
  snprintf(id->text, sizeof id->text, "/nccl-double-%d-%d-%d", int(getpid()), ++number,
           int(now() * 1000) & 0xffffff);
  return OK;
}

int ncclCommInitRankConfig(Comm** out, int size, UniqueId id, int rank, void*) {
  if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) return BAD_ARGUMENT;
  Comm* comm = attach(id.text, size, rank);
  if (!comm) return SYSTEM_ERROR;
  Result result = barrier(comm, "ncclCommInitRank");
  if (rank == 0 || result) shm_unlink(id.text);
  *out = comm;
  return result;
}

int ncclCommInitRank(Comm** out, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}

int ncclCommInitAll(Comm** out, int size, const int*) {
  UniqueId id;
  ncclGetUniqueId(&id);
  return size == 1 ? ncclCommInitRank(out, 1, id, 0) : int(BAD_USE);
}

int ncclCommSplit(Comm*, int, int, Comm**, void*) { return BAD_USE; }  // not used

// As NCCL's, it returns only when all ranks have come; ncclCommAbort does not wait.
int ncclCommDestroy(Comm* comm) {
  if (!comm) return OK;
  {
    std::unique_lock<std::mutex> hold(comm->lock);
    comm->turn.wait(hold, [&] { return comm->done == comm->posted; });
  }
  return barrier(comm, "ncclCommDestroy") ? REMOTE : OK;
}

int ncclCommAbort(Comm* comm) {
  if (comm) fail(comm, REMOTE);
  return OK;
}

int ncclCommGetAsyncError(Comm* comm, int* error) {
  *error = comm->shared->error;
  return OK;
}

int ncclCommCount(Comm* comm, int* count) { return *count = comm->size, OK; }
int ncclCommUserRank(Comm* comm, int* rank) { return *rank = comm->rank, OK; }
int ncclCommCuDevice(Comm* comm, int* device) { return *device = comm->rank, OK; }

int ncclGroupStart() { return depth++, OK; }

int ncclGroupEnd() {
  if (depth <= 0) return BAD_USE;
  return --depth ? int(OK) : flush();
}

#define POST(kind, send, recv, count, dtype, op, root)                            \
  post(comm, Post{kind, dtype, op, root, count, uint64_t(send), uint64_t(recv)}, \
       intptr_t(stream))

int ncclAllReduce(const void* send, void* recv, size_t count, int dtype, int op,
                  Comm* comm, void* stream) {
  return POST(ALL_REDUCE, send, recv, count, dtype, op, 0);
}

int ncclReduce(const void* send, void* recv, size_t count, int dtype, int op, int root,
               Comm* comm, void* stream) {
  return POST(REDUCE, send, recv, count, dtype, op, root);
}

int ncclBroadcast(const void* send, void* recv, size_t count, int dtype, int root,
                  Comm* comm, void* stream) {
  return POST(BROADCAST, send, recv, count, dtype, 0, root);
}

int ncclBcast(void* data, size_t count, int dtype, int root, Comm* comm, void* stream) {
  return POST(BROADCAST, data, data, count, dtype, 0, root);
}

int ncclReduceScatter(const void* send, void* recv, size_t count, int dtype, int op,
                      Comm* comm, void* stream) {
  return POST(REDUCE_SCATTER, send, recv, count, dtype, op, 0);
}

int ncclAllGather(const void* send, void* recv, size_t count, int dtype, Comm* comm,
                  void* stream) {
  return POST(ALL_GATHER, send, recv, count, dtype, 0, 0);
}

int ncclSend(const void* send, size_t count, int dtype, int peer, Comm* comm,
             void* stream) {
  return POST(SEND, send, nullptr, count, dtype, 0, peer);
}

int ncclRecv(void* recv, size_t count, int dtype, int peer, Comm* comm, void* stream) {
  return POST(RECV, nullptr, recv, count, dtype, 0, peer);
}

// -------------------------------------------------------- streams and events of tests
intptr_t double_stream_create() {
  std::lock_guard<std::mutex> hold(streams_lock);
  return ++last_name;
}

void double_stream_call(intptr_t name, void (*function)(void*), void* data) {
  if (Stream* stream = stream_of(name)) stream->put([=] { function(data); });
  else function(data);
}

void double_stream_synchronize(intptr_t name) {
  if (Stream* stream = stream_of(name)) stream->drain();
}

intptr_t double_event_record(intptr_t name) {
  auto event = std::make_shared<Event>();
  intptr_t number;
  {
    std::lock_guard<std::mutex> hold(streams_lock);
    events[number = ++last_name] = event;
  }
  if (Stream* stream = stream_of(name)) stream->put([event] { event->pass(); });
  else event->pass();
  return number;
}

void double_stream_wait_event(intptr_t name, intptr_t number) {
  auto event = event_of(number);
  if (Stream* stream = stream_of(name)) stream->put([event] { event->wait(); });
  else event->wait();
}

int double_event_query(intptr_t number) {
  auto event = event_of(number);
  std::lock_guard<std::mutex> hold(event->lock);
  return event->passed;
}

void double_event_destroy(intptr_t number) {
  std::lock_guard<std::mutex> hold(streams_lock);
  events.erase(number);
}

// A torch built for CUDA imports these from libnccl, too; nothing here calls them.
#define ABSENT(name) \
  int name() { return BAD_USE; }
ABSENT(ncclAlltoAll)
ABSENT(ncclCommDeregister)
ABSENT(ncclCommFinalize)
ABSENT(ncclCommGetUniqueId)
ABSENT(ncclCommGrow)
ABSENT(ncclCommInitRankScalable)
ABSENT(ncclCommMemStats)
ABSENT(ncclCommRegister)
ABSENT(ncclCommResume)
ABSENT(ncclCommRevoke)
ABSENT(ncclCommShrink)
ABSENT(ncclCommSuspend)
ABSENT(ncclCommWindowDeregister)
ABSENT(ncclCommWindowRegister)
ABSENT(ncclDevCommCreate)
ABSENT(ncclDevCommDestroy)
ABSENT(ncclGather)
ABSENT(ncclGetLastError)
ABSENT(ncclGetLsaMultimemDevicePointer)
ABSENT(ncclGetPeerDevicePointer)
ABSENT(ncclGroupSimulateEnd)
ABSENT(ncclMemAlloc)
ABSENT(ncclMemFree)
ABSENT(ncclPutSignal)
ABSENT(ncclRedOpCreatePreMulSum)
ABSENT(ncclRedOpDestroy)
ABSENT(ncclScatter)
ABSENT(ncclSignal)
ABSENT(ncclWaitSignal)
ABSENT(ncclWinGetUserPtr)
}
