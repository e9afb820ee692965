// The process group "nccl" or "hccl" (and "gloo" for tensors of the device): gloo moves the bytes, over views of the same memory.
// A collective blocks its caller; its stream, its order and what NCCL refuses are as NCCL has them.
#include "softcuda.h"
#include <algorithm>
#include <chrono>
#include <functional>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace softcuda {
using namespace c10d;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using Work_ = c10::intrusive_ptr<Work>;
using Ranks = std::vector<int64_t>;

// A collective that was started on a stream of its own. Who does not wait for it reads what is not there yet.
struct StreamWork final : Work {
  Tensors results, kept;
  StreamKey stream;
  Clock end;
  bool waited = false;
  c10::intrusive_ptr<c10::ivalue::Future> future;

  StreamWork(int rank, OpType type, Tensors results, Tensors kept, StreamKey stream)
      : Work(rank, type), results(std::move(results)), kept(std::move(kept)), stream(stream), end(clock_of(stream)) {
    std::vector<c10::Device> devices;
    for (auto& result : this->results)
      if (is_ours(result) && devices.empty()) devices.push_back(result.device());
    future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    auto before = current_stream(stream.first);
    set_stream(stream);  // the future's event is recorded here
    future->markCompleted(at::IValue(this->results));
    set_stream(before);
    finish();
  }
  ~StreamWork() override {  // NCCL's watchdog frees the inputs once the device is done with them
    for (auto& tensor : kept)
      if (!waited && is_ours(tensor)) record_stream(tensor.storage().data(), stream);
  }
  bool wait(std::chrono::milliseconds = kNoTimeout) override { synchronize(); return true; }
  void synchronize() override {
    stream_waits(current_stream(stream.first), end);
    if (opType_ == OpType::BARRIER) host_waits(end);
    waited = true;
    kept.clear();
  }
  bool isCompleted() override { host_waits(end); return true; }
  bool isSuccess() const override { return true; }
  Tensors result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
};

class Group final : public Backend {
 public:
  struct Settings {
    c10::intrusive_ptr<Backend> gloo;
    c10::intrusive_ptr<Store> positions;  // of all ranks, by global rank
    Ranks global_ranks;
    std::string name;
    std::chrono::milliseconds timeout;
    bool own;  // false: gloo, for tensors of the device
    std::function<void(int)> connect;  // raises if another rank of the group has the same device
    std::function<c10::intrusive_ptr<Backend>(c10::intrusive_ptr<Store>, std::vector<int>)> split;
  };
  Group(int rank, int size, Settings settings) : Backend(rank, size), is(std::move(settings)) {}

  const std::string getBackendName() const override { return is.own ? TRANSPORT : "gloo"; }
  bool supportsSplitting() const override { return is.own; }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<Store>& store, const std::vector<int>& ranks, const c10::intrusive_ptr<Options>&) override {
    if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) return nullptr;
    return is.split(store, ranks);
  }
  void eagerConnectSingleDevice(at::Device device) override { use(device.index()); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesced.emplace(); }
  Work_ endCoalescing() override {
    auto calls = std::move(*coalesced);
    coalesced.reset();
    for (auto& receive : calls.receives) finish_or_abandon([&] { return receive; }, "RECV", calls.results);
    auto stream = device < 0 ? StreamKey{0, 0} : own_stream();
    return c10::make_intrusive<StreamWork>(getRank(), OpType::COALESCED, calls.results, calls.results, stream);
  }

  Work_ broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return run(OpType::BROADCAST, options.asyncOp, tensors, tensors, [&] { auto views = host(tensors); return is.gloo->broadcast(views, options); });
  }
  Work_ allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return run(OpType::ALLREDUCE, options.asyncOp, tensors, tensors, [&] {
      auto views = host(tensors);
      return reduce(views, views, options, [&](auto& plain) { return is.gloo->allreduce(views, plain); });
    });
  }
  Work_ allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return each(OpType::ALLREDUCE_COALESCED, tensors, tensors, [&](Tensor& tensor, Tensor&) {
      Tensors one{tensor};
      return allreduce(one, options);
    });
  }
  Work_ reduce(Tensors& tensors, const ReduceOptions& options) override {
    return run(OpType::REDUCE, options.asyncOp, tensors, tensors, [&] {
      auto views = host(tensors);
      return reduce(views, views, options, [&](auto& plain) { return is.gloo->reduce(views, plain); });
    });
  }
  Work_ allgather(std::vector<Tensors>& out, Tensors& in, const AllgatherOptions& options) override {
    return run(OpType::ALLGATHER, options.asyncOp, in, out[0], [&] {
      std::vector<Tensors> views{host(out[0])};
      auto sources = host(in);
      return is.gloo->allgather(views, sources, options);
    });
  }
  Work_ _allgather_base(Tensor& out, Tensor& in, const AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(out.numel() == in.numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
    return run(OpType::_ALLGATHER_BASE, options.asyncOp, {in}, {out}, [&] {
      auto view = host(out), source = host(in).contiguous().clone();  // the input may be a part of the output
      return is.gloo->_allgather_base(view, source, options);
    });
  }
  Work_ allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const AllgatherOptions& options) override {
    return each(OpType::ALLGATHER_COALESCED, out, in, [&](Tensor& to, Tensor& from) { return _allgather_base(to, from, options); });
  }
  Work_ gather(std::vector<Tensors>& out, Tensors& in, const GatherOptions& options) override {
    return run(OpType::GATHER, options.asyncOp, in, out.empty() ? Tensors() : out[0], [&] {
      std::vector<Tensors> views;
      for (auto& tensors : out) views.push_back(host(tensors));
      auto sources = host(in);
      return is.gloo->gather(views, sources, options);
    });
  }
  Work_ scatter(Tensors& out, std::vector<Tensors>& in, const ScatterOptions& options) override {
    return run(OpType::SCATTER, options.asyncOp, in.empty() ? Tensors() : in[0], out, [&] {
      std::vector<Tensors> sources;
      for (auto& tensors : in) sources.push_back(host(tensors));
      auto views = host(out);
      return is.gloo->scatter(views, sources, options);
    });
  }
  Work_ reduce_scatter(Tensors& out, std::vector<Tensors>& in, const ReduceScatterOptions& options) override {
    return run(OpType::REDUCE_SCATTER, options.asyncOp, in[0], out, [&] {
      std::vector<Tensors> sources{copies(host(in[0]))};
      auto views = host(out);
      return reduce(sources[0], views, options, [&](auto& plain) { return is.gloo->reduce_scatter(views, sources, plain); });
    });
  }
  Work_ _reduce_scatter_base(Tensor& out, Tensor& in, const ReduceScatterOptions& options) override {
    TORCH_CHECK_VALUE(in.numel() == out.numel() * getSize(), "input tensor must be the same size as output size times world size");
    return run(OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {in}, {out}, [&] {
      Tensors view{host(out)}, source{host(in).clone()};  // the output may be a part of the input
      return reduce(source, view, options, [&](auto& plain) { return is.gloo->_reduce_scatter_base(view[0], source[0], plain); });
    });
  }
  Work_ reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const ReduceScatterOptions& options) override {
    return each(OpType::_REDUCE_SCATTER_BASE, out, in, [&](Tensor& to, Tensor& from) { return _reduce_scatter_base(to, from, options); });
  }
  Work_ alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, const AllToAllOptions& options) override {
    return run(OpType::ALLTOALL_BASE, options.asyncOp, {in}, {out}, [&] {
      auto view = host(out), source = host(in);
      return is.gloo->alltoall_base(view, source, out_sizes, in_sizes, options);
    });
  }
  Work_ alltoall(Tensors& out, Tensors& in, const AllToAllOptions& options) override {
    return run(OpType::ALLTOALL, options.asyncOp, in, out, [&] {
      std::vector<int64_t> to, from;
      Tensors flat;
      for (auto& tensor : out) to.push_back(tensor.numel());
      for (auto& tensor : in) { from.push_back(tensor.numel()); flat.push_back(host(tensor).reshape({-1})); }
      auto source = at::cat(flat), target = at::empty({std::accumulate(to.begin(), to.end(), int64_t(0))}, source.options());
      auto sizes = to;  // gloo empties lists of equal sizes
      finish(is.gloo->alltoall_base(target, source, sizes, from, options), "ALLTOALL");
      auto parts = target.split_with_sizes(to);
      for (size_t i = 0; i < out.size(); i++) host(out[i]).copy_(parts[i].view(out[i].sizes()));
      return Work_();
    });
  }
  Work_ send(Tensors& tensors, int to, int tag) override {
    return exchange(OpType::SEND, tensors, false, [&] {
      auto values = copies(host(tensors));
      sends.push_back({is.gloo->send(values, to, tag), values});
      if (sends.size() > 256) { finish(sends.front().first, "SEND"); sends.erase(sends.begin()); }
      return Work_();
    });
  }
  Work_ recv(Tensors& tensors, int from, int tag) override {
    return exchange(OpType::RECV, tensors, true, [&] { auto views = host(tensors); return is.gloo->recv(views, from, tag); });
  }
  Work_ barrier(const BarrierOptions& options) override {
    // NCCL's is a sum over one element, on the device that it is told, is bound to, has used, or guesses
    int on = !options.device_ids.empty() ? options.device_ids[0] : options.device ? options.device->index() : getBoundDeviceId() ? getBoundDeviceId()->index()
             : device >= 0 ? device : int(is.global_ranks[getRank()] % std::max(1, device_count()));
    use(on);
    Tensors none;
    auto work = run(OpType::BARRIER, true, none, none, [&] { return is.gloo->barrier(options); });
    report(Finding::wait, "barrier");
    return work;
  }

 private:
  struct Coalesced { std::vector<Work_> receives; Tensors results; };
  Settings is;
  int device = -1;
  std::optional<StreamKey> stream;
  uint64_t sequence = 0;
  std::optional<Coalesced> coalesced;
  std::vector<std::pair<Work_, Tensors>> sends;

  // --- what NCCL refuses ---

  void use(int index) {
    if (device < 0) {
      device = index;
      if (is.own) {  // NCCL's communicator is made by all ranks together
        finish(is.gloo->barrier(BarrierOptions()), "the start");
        is.connect(device);
      }
    }
    TORCH_CHECK(device == index, "a tensor on ", NAME, ":", index, " in a group of ", NAME, ":", device);
  }
  void check(const Tensors& tensors) {
    for (auto& tensor : tensors) {
      TORCH_CHECK_VALUE(is_ours(tensor) && !tensor.is_sparse(), "Tensors must be ", KIND, " and dense");
      TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      use(tensor.device().index());
    }
  }
  // Ranks whose next collectives of one group differ wait for one another for ever.
  void agree(OpType type, const Tensors& in, const Tensors& out) {
    auto same_sizes = type != OpType::ALLGATHER && type != OpType::REDUCE_SCATTER && type != OpType::ALLTOALL && type != OpType::ALLTOALL_BASE && type != OpType::GATHER &&
                      type != OpType::SCATTER;
    int64_t numel = 0;
    if (same_sizes) for (auto& tensor : in) numel += tensor.numel();
    auto& typed = in.empty() ? out : in;  // of a scatter one rank alone has inputs
    auto mine = at::tensor({int64_t(type), numel, typed.empty() ? int64_t(-1) : int64_t(typed[0].scalar_type())}, at::kLong);
    std::vector<Tensors> all(1);
    for (int i = 0; i < getSize(); i++) all[0].push_back(at::empty({3}, at::kLong));
    Tensors source{mine};
    finish(is.gloo->allgather(all, source), opTypeToString(type));
    for (int i = 0; i < getSize(); i++) {
      if (all[0][i].equal(mine)) continue;
      std::ostringstream text;
      text << "ranks start different collectives as number " << sequence << " of group " << is.name << ":";
      for (int j = 0; j < getSize(); j++) {
        auto* words = all[0][j].const_data_ptr<int64_t>();
        text << (j ? "; " : " ") << "rank " << is.global_ranks[j] << " " << opTypeToString(OpType(words[0])) << " of " << words[1] << " elements";
      }
      hang(text.str(), opTypeToString(type));
    }
  }
  [[noreturn]] void hang(const std::string& reason, const std::string& what) {
    report(Finding::hang, reason);
    std::this_thread::sleep_for(is.timeout);
    time_out(what, reason);
  }
  [[noreturn]] void time_out(const std::string& what, const std::string& reason) {
    C10_THROW_ERROR(DistBackendError, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=" + std::to_string(sequence) + ", OpType=" + what +
                    ", Timeout(ms)=" + std::to_string(is.timeout.count()) + ") ran for " + std::to_string(is.timeout.count()) +
                    " milliseconds before timing out. " + reason);
  }

  // --- waiting, and who waits for whom ---

  std::string position(const std::string& what) const {
    std::ostringstream text;
    text << what;
    if (sequence) text << " number " << sequence;
    text << " of group " << is.name << "|";
    for (auto rank : is.global_ranks) text << rank << ",";
    return text.str();
  }
  std::string key_of(int64_t rank) const { return "softcuda/waits/" + std::to_string(rank); }
  std::string read_position(int64_t rank) {
    if (!is.positions->check({key_of(rank)})) return "";
    auto bytes = is.positions->get(key_of(rank));
    return std::string(bytes.begin(), bytes.end());
  }
  void write_position(const std::string& text) { is.positions->set(key_of(is.global_ranks[getRank()]), std::vector<uint8_t>(text.begin(), text.end())); }

  // The ranks of a circle: each waits in a collective for the next, which waits in another.
  std::string circle() {
    std::map<int64_t, std::string> positions;
    std::function<bool(int64_t, std::vector<int64_t>&)> follow = [&](int64_t rank, std::vector<int64_t>& path) {
      auto& at = positions.try_emplace(rank, read_position(rank)).first->second;
      auto members = at.find('|');
      if (members == at.npos) return false;
      path.push_back(rank);
      std::istringstream list(at.substr(members + 1));
      for (std::string word; std::getline(list, word, ',');) {
        auto other = std::stoll(word);
        if (other == rank) continue;
        auto& its = positions.try_emplace(other, read_position(other)).first->second;
        if (its.empty() || its == at) continue;
        if (other == path[0] || (std::find(path.begin(), path.end(), other) == path.end() && follow(other, path))) return true;
      }
      path.pop_back();
      return false;
    };
    std::vector<int64_t> path;
    if (!follow(is.global_ranks[getRank()], path)) return "";
    std::ostringstream text;
    for (auto rank : path) text << (rank == path[0] ? "" : "; ") << "rank " << rank << " waits in " << positions[rank].substr(0, positions[rank].find('|'));
    return text.str();
  }
  void finish(const Work_& work, const std::string& what) {
    if (!work) return;
    if (what == "RECV" || what == "SEND") {  // gloo cannot wait for these twice
      try { work->wait(is.timeout); } catch (std::exception& error) { time_out(what, error.what()); }
      return;
    }
    bool posted = false;
    std::string before, reported;
    for (auto start = std::chrono::steady_clock::now();;) {
      try {
        work->wait(std::chrono::seconds(1));
        break;
      } catch (...) {
        if (work->isCompleted()) throw;
      }
      if (!posted) write_position(position(what));
      posted = true;
      auto now = circle();
      if (!now.empty() && now == before && now != reported) report(Finding::hang, reported = now);
      before = now;
      if (std::chrono::steady_clock::now() - start > is.timeout) time_out(what, now);
    }
    if (posted) write_position("");
  }

  // --- running ---

  // Views do not keep the memory: gloo's threads hold them for a while after a collective has ended.
  static Tensor host(const Tensor& tensor) {
    auto view = host_view(tensor, false);
    return view.scalar_type() == at::kBool ? view.view(at::kByte) : view;
  }
  static Tensors host(const Tensors& tensors) {
    Tensors views;
    for (auto& tensor : tensors) views.push_back(host(tensor));
    return views;
  }
  static Tensors copies(Tensors tensors) {
    for (auto& tensor : tensors) tensor = tensor.clone();
    return tensors;
  }
  // Gloo may still write to the tensors of a collective that has failed: they stay allocated.
  template <class Call> void finish_or_abandon(Call call, const std::string& what, const Tensors& tensors) {
    static auto* abandoned = new std::vector<Tensors>;
    try { finish(call(), what); } catch (...) { abandoned->push_back(tensors); throw; }
  }
  StreamKey own_stream() {
    if (!stream) stream = new_stream(device);
    return *stream;
  }
  template <class Call> Work_ run(OpType type, bool asynchronous, const Tensors& in, const Tensors& out, Call call) {
    check(in);
    check(out);
    sequence++;
    if (is.own) agree(type, in, out);
    auto caller = current_stream(device), on = asynchronous ? own_stream() : caller;
    if (asynchronous) stream_waits(on, clock_of(caller));
    auto name = "NCCL's " + opTypeToString(type);
    for (auto& tensor : in) access(tensor, false, on, name);
    for (auto& tensor : out) access(tensor, true, on, name);
    Tensors kept = in;
    kept.insert(kept.end(), out.begin(), out.end());
    finish_or_abandon(call, opTypeToString(type), kept);
    return c10::make_intrusive<StreamWork>(getRank(), type, out, kept, on);
  }
  template <class Call> Work_ exchange(OpType type, Tensors& tensors, bool write, Call call) {
    check(tensors);
    auto on = own_stream();
    stream_waits(on, clock_of(current_stream(device)));
    for (auto& tensor : tensors) access(tensor, write, on, "NCCL's " + opTypeToString(type));
    if (coalesced) {
      if (auto work = call()) coalesced->receives.push_back(work);
      coalesced->results.insert(coalesced->results.end(), tensors.begin(), tensors.end());
    } else
      finish_or_abandon(call, opTypeToString(type), tensors);
    return c10::make_intrusive<StreamWork>(getRank(), type, tensors, tensors, on);
  }
  template <class Call> Work_ each(OpType type, Tensors& out, Tensors& in, Call call) {
    for (size_t i = 0; i < out.size(); i++) call(out[i], in[i]);
    Tensors kept = in;
    kept.insert(kept.end(), out.begin(), out.end());
    return c10::make_intrusive<StreamWork>(getRank(), type, out, kept, own_stream());
  }
  // AVG and PREMUL_SUM, which gloo does not have, by a sum.
  template <class Options, class Call> Work_ reduce(Tensors& in, Tensors& out, const Options& options, Call call) {
    Options plain = options;
    double divisor = 1;
    if (options.reduceOp == ReduceOp::AVG) divisor = getSize();
    if (options.reduceOp == ReduceOp::PREMUL_SUM) {
      auto* by = reinterpret_cast<const NCCLPreMulSumSupplement*>(options.reduceOp.supplement_.get());
      for (auto& tensor : in) tensor.mul_(by->tensor_factor.defined() ? host_view(by->tensor_factor).item<double>() : by->double_factor);
    }
    if (options.reduceOp == ReduceOp::AVG || options.reduceOp == ReduceOp::PREMUL_SUM) plain.reduceOp = ReduceOp::SUM;
    auto work = call(plain);
    if (divisor == 1) return work;
    finish(work, "a mean");
    for (auto& tensor : out) tensor.div_(divisor);
    return Work_();
  }
};
}  // namespace softcuda
