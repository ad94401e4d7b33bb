// What the thread sanitizer sees of the stand-in: the memory that engines touch, and what the
// driver's rules put in order (work behind the call that enqueued it, events, words, streams that
// are found idle). Locks and counters of the stand-in's own put the rest in order too, by chance;
// if they were seen, copies that nothing orders would seldom be reported. Without that sanitizer
// nothing here does anything.
#pragma once

#if defined(__SANITIZE_THREAD__)
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void __tsan_acquire(void* place);
void __tsan_release(void* place);
}
#endif

namespace fakecuda {

#if defined(__SANITIZE_THREAD__)
inline thread_local int hidden_depth = 0;

inline void hide(bool hidden) {
  if (hidden) {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);  // and writes
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  } else {
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
}

// While one lives, what its thread does is not seen, but for what is Shown.
class Hidden {
 public:
  Hidden() {
    if (hidden_depth++ == 0) hide(true);
  }
  ~Hidden() {
    if (--hidden_depth == 0) hide(false);
  }
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
};

class Shown {
 public:
  Shown() : depth_(hidden_depth) {
    hidden_depth = 0;
    if (depth_ > 0) hide(false);
  }
  ~Shown() {
    if (depth_ > 0) hide(true);
    hidden_depth = depth_;
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

 private:
  int depth_;
};

// What a thread did before it passes the place on comes before what others do once they take over.
inline void pass_on(const void* place) {
  const Shown shown;
  __tsan_release(const_cast<void*>(place));
}
inline void take_over(const void* place) {
  const Shown shown;
  __tsan_acquire(const_cast<void*>(place));
}
#else
class Hidden {
 public:
  Hidden() {}
};
class Shown {
 public:
  Shown() {}
};
inline void pass_on(const void*) {}
inline void take_over(const void*) {}
#endif

}  // namespace fakecuda
