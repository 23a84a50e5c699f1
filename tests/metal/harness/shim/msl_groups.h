// Barriers, simd and quad groups, matrices of 8 x 8, atomics.
namespace metal {
// Synchronisation.
enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint32_t(a) | uint32_t(b)); }
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
#define MSL_HERE std::source_location here = std::source_location::current()
#define MSL_SITE msl::Site{here.file_name(), here.line(), here.column()}
MSL_NOSAN inline void threadgroup_barrier(mem_flags f, MSL_HERE) { msl::rt_barrier(msl::OP_TG_BARRIER, uint32_t(f), MSL_SITE); }
MSL_NOSAN inline void simdgroup_barrier(mem_flags f, MSL_HERE) { msl::rt_barrier(msl::OP_SG_BARRIER, uint32_t(f), MSL_SITE); }
inline void atomic_thread_fence(mem_flags f, memory_order, thread_scope = thread_scope_device) { msl::rt_fence(uint32_t(f)); }

// Simd and quad groups.
namespace detail {
// Metal: char, short, int, half, bfloat, float and their vectors; no bool, no 64-bit.
template <class T> concept simd_t = any_num<T> && !std::is_same_v<msl::ve<T>, bool> && sizeof(msl::ve<T>) <= 4;
template <int OP> inline constexpr int width = OP == msl::OP_QUAD ? 4 : 32;
template <class T> MSL_NOSAN inline T rd(const void* p) { T t; __builtin_memcpy((void*)&t, p, sizeof(T)); return t; }
template <int OP> MSL_NOSAN inline uint base() { return OP == msl::OP_QUAD ? (msl::rt_lane() & ~3u) : 0u; }
template <int OP, class T, class F> MSL_NOSAN inline T reduce(const char* nm, T v, F f, msl::Site s) {
  msl::Rec* r = msl::rt_simd(OP, nm, &v, sizeof(T), s);
  if (!r->done) {
    const uint b = base<OP>(); T x[32]; bool on[32];
    for (int i = 0; i < width<OP>; i++) { on[i] = r->mask >> (b + i) & 1; if (on[i]) x[i] = rd<T>(r->val[b + i]); }
    for (int st = 1; st < width<OP>; st *= 2)           // pairwise tree
      for (int i = 0; i < width<OP>; i += 2 * st) {
        if (on[i] && on[i + st]) x[i] = f(x[i], x[i + st]);
        else if (on[i + st]) { x[i] = x[i + st]; on[i] = true; }
      }
    __builtin_memcpy(r->res, (const void*)&x[0], sizeof(T));
    r->done = 1;
  }
  return rd<T>(r->res);
}
template <int OP, class T> MSL_NOSAN inline T pick(const char* nm, T v, int lane, bool own_if_out, msl::Site s) {
  msl::Rec* r = msl::rt_simd(OP, nm, &v, sizeof(T), s);
  if (unsigned(lane) >= unsigned(width<OP>)) {
    if (own_if_out) return v;
    msl::rt_fail("bad-lane", "%s reads lane %d of a %d-wide group (line %u)", nm, lane, width<OP>, s.line);
  }
  const uint l = base<OP>() + uint(lane);
  if (!(r->mask >> l & 1)) msl::rt_fail("inactive-lane", "%s reads lane %d, which is not active (line %u): the value is undefined in Metal", nm, lane, s.line);
  return rd<T>(r->val[l]);
}
template <int OP, class T, class F> MSL_NOSAN inline T scan(const char* nm, T v, T id, bool incl, F f, msl::Site s) {
  msl::Rec* r = msl::rt_simd(OP, nm, &v, sizeof(T), s);
  T a = id; const uint b = base<OP>(), me = msl::rt_lane() - b;
  for (uint i = 0; i < me + (incl ? 1 : 0); i++) if (r->mask >> (b + i) & 1) a = f(a, rd<T>(r->val[b + i]));
  return a;
}
}  // namespace detail
#define MSL_GROUP(pre, OP)                                                                                   \
  template <detail::simd_t T> inline T pre##_sum(T v, MSL_HERE) { return detail::reduce<OP>(#pre "_sum", v, [](T a, T b) { return T(a + b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_product(T v, MSL_HERE) { return detail::reduce<OP>(#pre "_product", v, [](T a, T b) { return T(a * b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_max(T v, MSL_HERE) { return detail::reduce<OP>(#pre "_max", v, [](T a, T b) { return T(max(a, b)); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_min(T v, MSL_HERE) { return detail::reduce<OP>(#pre "_min", v, [](T a, T b) { return T(min(a, b)); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_and(T v, MSL_HERE) { return detail::reduce<OP>(#pre "_and", v, [](T a, T b) { return T(a & b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_or(T v, MSL_HERE) { return detail::reduce<OP>(#pre "_or", v, [](T a, T b) { return T(a | b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_xor(T v, MSL_HERE) { return detail::reduce<OP>(#pre "_xor", v, [](T a, T b) { return T(a ^ b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_broadcast(T v, ushort lane, MSL_HERE) { return detail::pick<OP>(#pre "_broadcast", v, lane, false, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_shuffle(T v, ushort lane, MSL_HERE) { return detail::pick<OP>(#pre "_shuffle", v, lane, false, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_shuffle_xor(T v, ushort m, MSL_HERE) { return detail::pick<OP>(#pre "_shuffle_xor", v, int(msl::rt_lane() % detail::width<OP>) ^ m, false, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_shuffle_up(T v, ushort d, MSL_HERE) { return detail::pick<OP>(#pre "_shuffle_up", v, int(msl::rt_lane() % detail::width<OP>) - d, true, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_shuffle_down(T v, ushort d, MSL_HERE) { return detail::pick<OP>(#pre "_shuffle_down", v, int(msl::rt_lane() % detail::width<OP>) + d, true, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_shuffle_rotate_up(T v, ushort d, MSL_HERE) { return detail::pick<OP>(#pre "_shuffle_rotate_up", v, int(msl::rt_lane() - d) & (detail::width<OP> - 1), false, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_shuffle_rotate_down(T v, ushort d, MSL_HERE) { return detail::pick<OP>(#pre "_shuffle_rotate_down", v, int(msl::rt_lane() + d) & (detail::width<OP> - 1), false, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_shuffle_and_fill_up(T v, T fill, ushort d, MSL_HERE) {          \
    const int l = int(msl::rt_lane() % detail::width<OP>) - d;                                               \
    T x = detail::pick<OP>(#pre "_shuffle_and_fill_up", v, l, true, MSL_SITE);                               \
    T y = detail::pick<OP>(#pre "_shuffle_and_fill_up", fill, l < 0 ? l + detail::width<OP> : l, false, MSL_SITE); \
    return l < 0 ? y : x;                                                                                    \
  }                                                                                                          \
  template <detail::simd_t T> inline T pre##_shuffle_and_fill_down(T v, T fill, ushort d, MSL_HERE) {        \
    const int l = int(msl::rt_lane() % detail::width<OP>) + d;                                               \
    T x = detail::pick<OP>(#pre "_shuffle_and_fill_down", v, l, true, MSL_SITE);                             \
    T y = detail::pick<OP>(#pre "_shuffle_and_fill_down", fill, l >= detail::width<OP> ? l - detail::width<OP> : l, false, MSL_SITE); \
    return l >= detail::width<OP> ? y : x;                                                                   \
  }                                                                                                          \
  template <detail::simd_t T> inline T pre##_prefix_exclusive_sum(T v, MSL_HERE) { return detail::scan<OP>(#pre "_prefix_exclusive_sum", v, T(0), false, [](T a, T b) { return T(a + b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_prefix_inclusive_sum(T v, MSL_HERE) { return detail::scan<OP>(#pre "_prefix_inclusive_sum", v, T(0), true, [](T a, T b) { return T(a + b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_prefix_exclusive_product(T v, MSL_HERE) { return detail::scan<OP>(#pre "_prefix_exclusive_product", v, T(1), false, [](T a, T b) { return T(a * b); }, MSL_SITE); } \
  template <detail::simd_t T> inline T pre##_prefix_inclusive_product(T v, MSL_HERE) { return detail::scan<OP>(#pre "_prefix_inclusive_product", v, T(1), true, [](T a, T b) { return T(a * b); }, MSL_SITE); } \
  inline bool pre##_all(bool b, MSL_HERE) { return detail::reduce<OP>(#pre "_all", uint(b), [](uint x, uint y) { return x & y; }, MSL_SITE) != 0; } \
  inline bool pre##_any(bool b, MSL_HERE) { return detail::reduce<OP>(#pre "_any", uint(b), [](uint x, uint y) { return x | y; }, MSL_SITE) != 0; }
MSL_GROUP(simd, msl::OP_SIMD)
MSL_GROUP(quad, msl::OP_QUAD)
#undef MSL_GROUP
template <detail::simd_t T> MSL_NOSAN inline T simd_broadcast_first(T v, MSL_HERE) {
  msl::Rec* r = msl::rt_simd(msl::OP_SIMD, "simd_broadcast_first", &v, sizeof(T), MSL_SITE);
  return detail::rd<T>(r->val[__builtin_ctz(r->mask)]);
}
class simd_vote {
 public:
  typedef ulong vote_t;
  explicit simd_vote(vote_t v = 0) : v_(v) {}
  explicit operator vote_t() const { return v_; }
  bool all() const { return (v_ & 0xffffffffu) == 0xffffffffu; }
  bool any() const { return v_ != 0; }
 private:
  vote_t v_;
};
MSL_NOSAN inline simd_vote simd_ballot(bool b, MSL_HERE) {
  uint v = b;
  msl::Rec* r = msl::rt_simd(msl::OP_SIMD, "simd_ballot", &v, 4, MSL_SITE);
  ulong m = 0;
  for (int i = 0; i < 32; i++) if ((r->mask >> i & 1) && detail::rd<uint>(r->val[i])) m |= 1ul << i;
  return simd_vote(m);
}
MSL_NOSAN inline simd_vote simd_active_threads_mask(MSL_HERE) {
  uint v = 1; return simd_vote(msl::rt_simd(msl::OP_SIMD, "simd_active_threads_mask", &v, 4, MSL_SITE)->mask);
}
MSL_NOSAN inline bool simd_is_first(MSL_HERE) {
  uint v = 1; return uint(__builtin_ctz(msl::rt_simd(msl::OP_SIMD, "simd_is_first", &v, 4, MSL_SITE)->mask)) == msl::rt_lane();
}

// Simdgroup_matrix (8 x 8).
// Lane layout as on Apple GPUs: lane holds (row, col) and (row, col + 1).
namespace detail {
inline void sm_coord(uint lane, int& row, int& col) {
  const uint q = lane / 4;
  row = int((q & 4) + (lane / 2) % 4);
  col = int((q & 2) * 2 + (lane % 2) * 2);
}
}  // namespace detail
template <class T, int R = 8, int C = 8> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup_matrix is 8x8 only");
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>, "simdgroup_matrix: float, half or bfloat");
  vec<T, 2> e_;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diag) { int r, c; detail::sm_coord(msl::rt_lane(), r, c); e_.x = r == c ? diag : T(0); e_.y = r == c + 1 ? diag : T(0); }
  vec<T, 2>& thread_elements() { return e_; }
  const vec<T, 2>& thread_elements() const { return e_; }
};
template <class T, int R, int C> inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) { simdgroup_matrix<T, R, C> m; m.e_ = vec<T, 2>(v); return m; }
template <class T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* src, ulong ld = 8, ulong2 org = ulong2(0), bool tr = false, MSL_HERE) {
  msl::rt_sync_all("simdgroup_load", MSL_SITE);
  int r, c; detail::sm_coord(msl::rt_lane(), r, c);
  for (int j = 0; j < 2; j++) {
    const ulong rr = org.y + ulong(tr ? c + j : r), cc = org.x + ulong(tr ? r : c + j);
    d.e_.set(j, src[rr * ld + cc]);
  }
}
template <class T> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& a, T* dst, ulong ld = 8, ulong2 org = ulong2(0), bool tr = false, MSL_HERE) {
  msl::rt_sync_all("simdgroup_store", MSL_SITE);
  int r, c; detail::sm_coord(msl::rt_lane(), r, c);
  for (int j = 0; j < 2; j++) {
    const ulong rr = org.y + ulong(tr ? c + j : r), cc = org.x + ulong(tr ? r : c + j);
    dst[rr * ld + cc] = a.e_.get(j);
  }
}
namespace detail {
template <class D, class A, class B> MSL_NOSAN inline vec<float, 2> mm(const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, vec<float, 2> acc, msl::Site s) {
  float v[4] = {float(a.e_.get(0)), float(a.e_.get(1)), float(b.e_.get(0)), float(b.e_.get(1))};
  msl::Rec* r = msl::rt_simd(msl::OP_SIMD, "simdgroup_multiply", v, sizeof v, s);
  if (r->mask != 0xffffffffu) msl::rt_fail("divergence", "simdgroup_multiply needs all 32 lanes (line %u)", s.line);
  static int inv[8][8]; static bool ready = false;
  if (!ready) { for (uint l = 0; l < 32; l++) { int rr, cc; sm_coord(l, rr, cc); inv[rr][cc] = int(l); inv[rr][cc + 1] = int(l); } ready = true; }
  int row, col; sm_coord(msl::rt_lane(), row, col);
  for (int j = 0; j < 2; j++) {
    float x = acc.get(j);
    for (int k = 0; k < 8; k++)
      x = __builtin_fmaf(rd<float>(r->val[inv[row][k]] + 4 * (k & 1)), rd<float>(r->val[inv[k][col + j]] + 8 + 4 * ((col + j) & 1)), x);
    acc.set(j, x);
  }
  return acc;
}
}  // namespace detail
template <class D, class A, class B, class C> inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c, MSL_HERE) {
  d.e_ = vec<D, 2>(detail::mm<D>(a, b, vec<float, 2>(float(c.e_.get(0)), float(c.e_.get(1))), MSL_SITE));
}
template <class D, class A, class B> inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, MSL_HERE) {
  d.e_ = vec<D, 2>(detail::mm<D>(a, b, vec<float, 2>(0.0f), MSL_SITE));
}
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// Atomics.
template <class T> struct atomic {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, uint> || std::is_same_v<T, float> || std::is_same_v<T, bool> || std::is_same_v<T, ulong>,
                "Metal has atomic<int>, <uint>, <float>, <bool> and (min/max only) <ulong>");
  T v_;
  atomic() = default;
  atomic(const atomic&) = delete;
  void operator=(const atomic&) = delete;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
#define MSL_PC __builtin_return_address(0)
#define MSL_ORD memory_order
#define MSL_AT(T) volatile atomic<T>* p
template <class T> struct type_id { using type = T; };
template <class T> MSL_NOSAN inline T atomic_load_explicit(const volatile atomic<T>* p, memory_order) { msl::rt_atomic((const void*)p, sizeof(T), false, MSL_PC); return p->v_; }
template <class T> MSL_NOSAN inline void atomic_store_explicit(volatile atomic<T>* p, typename type_id<T>::type v, memory_order) { msl::rt_atomic((const void*)p, sizeof(T), true, MSL_PC); p->v_ = v; }
#define MSL_RMW(name, ok, expr)                                                                  \
  template <class T> MSL_NOSAN inline T atomic_##name##_explicit(volatile atomic<T>* p, typename type_id<T>::type v, memory_order) { \
    static_assert(ok, "this atomic operation does not exist for this type in Metal");            \
    msl::rt_atomic((const void*)p, sizeof(T), true, MSL_PC);                                     \
    T o = p->v_; p->v_ = T(expr); return o;                                                      \
  }
#define MSL_I (std::is_same_v<T, int> || std::is_same_v<T, uint>)
#define MSL_IF (MSL_I || std::is_same_v<T, float>)
MSL_RMW(exchange, MSL_IF || (std::is_same_v<T, bool>), v)
MSL_RMW(fetch_add, MSL_IF, o + v) MSL_RMW(fetch_sub, MSL_IF, o - v)
MSL_RMW(fetch_max, MSL_I, o < v ? v : o) MSL_RMW(fetch_min, MSL_I, v < o ? v : o)
MSL_RMW(fetch_and, MSL_I, o & v) MSL_RMW(fetch_or, MSL_I, o | v) MSL_RMW(fetch_xor, MSL_I, o ^ v)
#undef MSL_RMW
template <class T> MSL_NOSAN inline void atomic_max_explicit(volatile atomic<T>* p, typename type_id<T>::type v, memory_order) { static_assert(std::is_same_v<T, ulong>); msl::rt_atomic((const void*)p, 8, true, MSL_PC); if (p->v_ < v) p->v_ = v; }
template <class T> MSL_NOSAN inline void atomic_min_explicit(volatile atomic<T>* p, typename type_id<T>::type v, memory_order) { static_assert(std::is_same_v<T, ulong>); msl::rt_atomic((const void*)p, 8, true, MSL_PC); if (v < p->v_) p->v_ = v; }
template <class T> MSL_NOSAN inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected, typename type_id<T>::type v, memory_order, memory_order) {
  msl::rt_atomic((const void*)p, sizeof(T), true, MSL_PC);
  if (__builtin_memcmp((const void*)&p->v_, (const void*)expected, sizeof(T)) == 0) { p->v_ = v; return true; }
  *expected = p->v_; return false;
}
}  // namespace metal
