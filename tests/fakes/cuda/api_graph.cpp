// Entry points for graphs, and for the user objects that they keep.
#include "tests/fakes/cuda/graph.h"
#include "tests/fakes/cuda/user_object.h"

namespace fakecuda {
namespace {

Registry<GraphExec, GraphExecHandle>& graph_execs() {
  static auto* const value = new Registry<GraphExec, GraphExecHandle>(6, kInvalidValue);
  return *value;
}

}  // namespace

Registry<Graph, GraphHandle>& graphs() {
  static auto* const value = new Registry<Graph, GraphHandle>(5, kInvalidValue);
  return *value;
}

uint64_t live_graphs() { return graphs().size() + graph_execs().size(); }

FAKE_API Result cuGraphInstantiateWithFlags(GraphExecHandle* out, GraphHandle graph,
                                            unsigned long long flags) {
  return enter("cuGraphInstantiateWithFlags", [&] {
    require(out != nullptr && flags < 16, kInvalidValue);
    *out = graph_execs().add(std::make_shared<GraphExec>(*graphs().find(graph)));
  });
}

FAKE_API Result cuGraphLaunch(GraphExecHandle handle, StreamHandle stream) {
  return enter("cuGraphLaunch", [&] {
    const auto exec = graph_execs().find(handle);
    stream_of(stream)->push([exec](Engine& engine) { return exec->run(engine); });
  });
}

FAKE_API Result cuGraphDestroy(GraphHandle handle) {
  return enter("cuGraphDestroy", [&] { graphs().remove(handle); });
}

FAKE_API Result cuGraphExecDestroy(GraphExecHandle handle) {
  return enter("cuGraphExecDestroy", [&] { graph_execs().remove(handle); });
}

FAKE_API Result cuUserObjectCreate(UserObjectHandle* out, void* value, HostFunction destroy,
                                   unsigned count, unsigned flags) {
  return enter("cuUserObjectCreate", [&] {
    require(out != nullptr && destroy != nullptr, kInvalidValue);
    require(count > 0 && flags == kNoDestructorSync, kInvalidValue);
    *out = user_objects().add(std::make_shared<UserObject>(value, destroy, count));
  });
}

FAKE_API Result cuUserObjectRelease(UserObjectHandle handle, unsigned count) {
  return enter("cuUserObjectRelease", [&] {
    require(count > 0, kInvalidValue);
    user_objects().find(handle)->release(count);
  });
}

FAKE_API Result cuGraphRetainUserObject(GraphHandle handle, UserObjectHandle object_handle,
                                        unsigned count, unsigned flags) {
  return enter("cuGraphRetainUserObject", [&] {
    require(count > 0 && flags <= kUserObjectMove, kInvalidValue);
    const auto graph = graphs().find(handle);
    const auto object = user_objects().find(object_handle);
    if (flags != kUserObjectMove) object->retain(count);
    for (unsigned i = 0; i < count; ++i) graph->references.emplace_back(object);
  });
}

}  // namespace fakecuda
