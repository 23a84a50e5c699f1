// Vectors.
namespace metal { template <class T, int N> struct vec; }
namespace msl {
using metal::vec;
template <int B> struct raw_bytes { typedef unsigned char type __attribute__((vector_size(B), may_alias)); };

template <class T> struct vt { static constexpr int n = 0; using e = T; };
template <class T, int S, int... I> struct swz;
template <class T, int N> struct vt<vec<T, N>> { static constexpr int n = N; using e = T; };
template <class T, int S, int... I> struct vt<swz<T, S, I...>> { static constexpr int n = sizeof...(I); using e = T; };
template <class A> inline constexpr int vn = vt<std::remove_cvref_t<A>>::n;
template <class A> using ve = typename vt<std::remove_cvref_t<A>>::e;
template <class A> inline auto at(const A& a, int i) { if constexpr (vn<A> == 0) return a; else return a.get(i); }

// A swizzle: lives in the vector's union, so it starts where the vector does.
template <class T, int S, int... I> struct swz {
  T d_[S];
  static constexpr int K = sizeof...(I);
  static constexpr int ix_[K] = {I...};
  static constexpr bool unique_() { for (int i = 0; i < K; i++) for (int j = 0; j < i; j++) if (ix_[i] == ix_[j]) return false; return true; }
  T get(int i) const { return d_[ix_[i]]; }
  T operator[](int i) const { return d_[ix_[i]]; }
  operator vec<T, K>() const { vec<T, K> r; for (int i = 0; i < K; i++) r.set(i, d_[ix_[i]]); return r; }
  void store_(const vec<T, K>& v) {
    static_assert(unique_(), "a swizzle with a repeated component is not assignable");
    for (int i = 0; i < K; i++) d_[ix_[i]] = v.get(i);
  }
  swz() = default;
  swz& operator=(const swz& o) { store_(vec<T, K>(o)); return *this; }
  swz& operator=(const vec<T, K>& o) { store_(o); return *this; }
  template <int S2, int... J> requires(sizeof...(J) == K) swz& operator=(const swz<T, S2, J...>& o) { store_(vec<T, K>(o)); return *this; }
  swz& operator=(T s) { store_(vec<T, K>(s)); return *this; }
#define MSL_C(op) template <class B> swz& operator op##=(const B& b) { store_(vec<T, K>(*this) op b); return *this; }
  MSL_C(+) MSL_C(-) MSL_C(*) MSL_C(/)
#undef MSL_C
};
}  // namespace msl

#include "swizzles.inc"


namespace metal {
#define MSL_N 2
#define MSL_CAP 2
#define MSL_NAMES x, y
#define MSL_NAMES2 r, g
#define MSL_SW MSL_SWIZZLES_2
#include "vec_body.inc"
#undef MSL_N
#undef MSL_CAP
#undef MSL_NAMES
#undef MSL_NAMES2
#undef MSL_SW
#define MSL_N 3
#define MSL_CAP 4
#define MSL_NAMES x, y, z
#define MSL_NAMES2 r, g, b
#define MSL_SW MSL_SWIZZLES_3
#include "vec_body.inc"
#undef MSL_N
#undef MSL_CAP
#undef MSL_NAMES
#undef MSL_NAMES2
#undef MSL_SW
#define MSL_N 4
#define MSL_CAP 4
#define MSL_NAMES x, y, z, w
#define MSL_NAMES2 r, g, b, a
#define MSL_SW MSL_SWIZZLES_4
#include "vec_body.inc"

template <class T, int N> struct packed_vec {  // no padding, element alignment
  T d_[N];
  packed_vec() = default;
  packed_vec(const vec<T, N>& v) { for (int i = 0; i < N; i++) d_[i] = v.get(i); }
  operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; i++) r.set(i, d_[i]); return r; }
  T& operator[](int i) { return d_[i]; }
  const T& operator[](int i) const { return d_[i]; }
};

template <class T, size_t N> struct array {
  T d_[N];
  constexpr T& operator[](size_t i) { return d_[i]; }
  constexpr const T& operator[](size_t i) const { return d_[i]; }
  static constexpr size_t size() { return N; }
  constexpr T* begin() { return d_; }
  constexpr T* end() { return d_ + N; }
};

// Element-wise operators over vec and swizzle, with scalars splatted.
namespace detail {
template <class A, class B> inline constexpr bool vpair =
    (msl::vn<A> > 0 || msl::vn<B> > 0) &&
    ((msl::vn<A> > 0 && msl::vn<B> > 0) ? (msl::vn<A> == msl::vn<B> && std::is_same_v<msl::ve<A>, msl::ve<B>>)
     : msl::vn<A> > 0 ? msl::scalar_<B> : msl::scalar_<A>);
template <class A, class B> inline constexpr int pn = msl::vn<A> > 0 ? msl::vn<A> : msl::vn<B>;
template <class A, class B> using pe = std::conditional_t<(msl::vn<A> > 0), msl::ve<A>, msl::ve<B>>;
}  // namespace detail
#define MSL_OP(op)                                                                               \
  template <class A, class B> requires detail::vpair<A, B>                                       \
  auto operator op(const A& a, const B& b) {                                                     \
    using E = detail::pe<A, B>; constexpr int n = detail::pn<A, B>; vec<E, n> r;                 \
    for (int i = 0; i < n; i++) r.set(i, E(E(msl::at(a, i)) op E(msl::at(b, i))));               \
    return r;                                                                                    \
  }
MSL_OP(+) MSL_OP(-) MSL_OP(*) MSL_OP(/) MSL_OP(%) MSL_OP(&) MSL_OP(|) MSL_OP(^) MSL_OP(<<) MSL_OP(>>)
#undef MSL_OP
#define MSL_CMP(op)                                                                              \
  template <class A, class B> requires detail::vpair<A, B>                                       \
  auto operator op(const A& a, const B& b) {                                                     \
    using E = detail::pe<A, B>; constexpr int n = detail::pn<A, B>; vec<bool, n> r;              \
    for (int i = 0; i < n; i++) r.set(i, E(msl::at(a, i)) op E(msl::at(b, i)));                  \
    return r;                                                                                    \
  }
MSL_CMP(==) MSL_CMP(!=) MSL_CMP(<) MSL_CMP(<=) MSL_CMP(>) MSL_CMP(>=) MSL_CMP(&&) MSL_CMP(||)
#undef MSL_CMP
#define MSL_UN(op) template <class A> requires(msl::vn<A> > 0) auto operator op(const A& a) { \
    constexpr int n = msl::vn<A>; using E = msl::ve<A>; vec<E, n> r; for (int i = 0; i < n; i++) r.set(i, E(op a.get(i))); return r; }
MSL_UN(-) MSL_UN(~) MSL_UN(!)
#undef MSL_UN
}  // namespace metal

#define MSL_T(t, name)                                                                   \
  typedef metal::vec<t, 2> name##2; typedef metal::vec<t, 3> name##3; typedef metal::vec<t, 4> name##4;
MSL_T(float, float) MSL_T(half, half) MSL_T(bfloat, bfloat) MSL_T(int, int) MSL_T(uint, uint)
MSL_T(short, short) MSL_T(ushort, ushort) MSL_T(signed char, char) MSL_T(uchar, uchar)
MSL_T(long, long) MSL_T(ulong, ulong) MSL_T(bool, bool)
#undef MSL_T
#define MSL_T(t, name)                                                                   \
  typedef metal::packed_vec<t, 2> packed_##name##2; typedef metal::packed_vec<t, 3> packed_##name##3; \
  typedef metal::packed_vec<t, 4> packed_##name##4;
MSL_T(float, float) MSL_T(half, half) MSL_T(int, int) MSL_T(uint, uint) MSL_T(short, short)
MSL_T(ushort, ushort) MSL_T(signed char, char) MSL_T(uchar, uchar)
#undef MSL_T

template <class To, class From> inline To as_type(const From& from) {
  std::conditional_t<(msl::vn<From> > 0), metal::vec<msl::ve<From>, msl::vn<From> ? msl::vn<From> : 2>, From> f = from;  // a swizzle is copied out
  static_assert(sizeof(To) == sizeof(f), "as_type: sizes differ");
  To t;
  __builtin_memcpy((void*)&t, (const void*)&f, sizeof(To));
  return t;
}
