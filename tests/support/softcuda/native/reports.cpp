// Findings: counted, and handed to a listener.
#include "softcuda.h"
#include <atomic>

namespace softcuda {
namespace {
std::atomic<int64_t> counts[4];
std::atomic<Listener> listener{nullptr};
constexpr const char* NAMES[] = {"race", "hang", "wait", "unpinned"};
}  // namespace

void report(Finding finding, const std::string& text) {
  counts[int(finding)]++;
  if (auto call = listener.load()) call(NAMES[int(finding)], text.c_str());
}
int64_t count_findings(Finding finding) { return counts[int(finding)]; }
void listen(Listener call) { listener = call; }
}  // namespace softcuda
