// Metal::.
namespace metal {
using std::conditional; using std::conditional_t; using std::enable_if; using std::enable_if_t;
using std::integral_constant; using std::is_convertible_v; using std::is_same; using std::is_same_v;
using std::true_type; using std::false_type; using std::remove_cv_t; using std::remove_reference_t; using std::declval;
using std::is_signed_v; using std::is_unsigned_v; using std::bool_constant; using std::remove_cv; using std::remove_reference; using std::is_const_v;
template <class T> using remove_addrspace_t = T;
using std::make_signed_t;  using std::is_integral_v; using std::make_unsigned_t; using std::is_integral;
template <class T> inline constexpr bool is_floating_point_v = msl::is_fp<T>;
template <class T> struct is_floating_point : std::bool_constant<msl::is_fp<T>> {};
template <class T> inline constexpr bool is_arithmetic_v = msl::scalar_<T>;

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<half> {
  static constexpr half b_(uint16_t u) { return __builtin_bit_cast(half, u); }
  static constexpr half max() { return b_(0x7bff); } static constexpr half min() { return b_(0x0400); }
  static constexpr half lowest() { return b_(0xfbff); } static constexpr half infinity() { return b_(0x7c00); }
  static constexpr half quiet_NaN() { return b_(0x7e00); } static constexpr half epsilon() { return b_(0x1400); }
};
template <> struct numeric_limits<bfloat> {
  static constexpr bfloat b_(uint16_t u) { bfloat b(0); b.bits_ = u; return b; }
  static constexpr bfloat max() { return b_(0x7f7f); } static constexpr bfloat min() { return b_(0x0080); }
  static constexpr bfloat lowest() { return b_(0xff7f); } static constexpr bfloat infinity() { return b_(0x7f80); }
  static constexpr bfloat quiet_NaN() { return b_(0x7fc0); } static constexpr bfloat epsilon() { return b_(0x3c00); }
};

// Unary float functions: scalar float/half/bfloat computed in float, vectors element-wise.
namespace detail {
template <class T> concept fpv = msl::is_fp<T> || (msl::vn<T> > 0 && msl::is_fp<msl::ve<T>>);
template <class A, class F> auto map1(const A& a, F f) {
  using E = msl::ve<A>;
  if constexpr (msl::vn<A> == 0) return E(f(float(a)));
  else { vec<E, msl::vn<A>> r; for (int i = 0; i < msl::vn<A>; i++) r.set(i, E(f(float(a.get(i))))); return r; }
}
template <class A, class F> auto map1b(const A& a, F f) {
  if constexpr (msl::vn<A> == 0) return bool(f(float(a)));
  else { vec<bool, msl::vn<A>> r; for (int i = 0; i < msl::vn<A>; i++) r.set(i, bool(f(float(a.get(i))))); return r; }
}
template <class A, class F> auto map2(const A& a, const A& b, F f) {
  using E = msl::ve<A>;
  if constexpr (msl::vn<A> == 0) return E(f(a, b));
  else { vec<E, msl::vn<A>> r; for (int i = 0; i < msl::vn<A>; i++) r.set(i, E(f(a.get(i), b.get(i)))); return r; }
}
template <class A, class F> auto map3(const A& a, const A& b, const A& c, F f) {
  using E = msl::ve<A>;
  if constexpr (msl::vn<A> == 0) return E(f(a, b, c));
  else { vec<E, msl::vn<A>> r; for (int i = 0; i < msl::vn<A>; i++) r.set(i, E(f(a.get(i), b.get(i), c.get(i)))); return r; }
}
inline float round_even(float x) { return __builtin_rintf(x); }
}  // namespace detail
// Hostile mode: fast math may assume that no value is infinite or NaN, so a
// function called with one gives NaN (fast:: only, or all but precise::).
#define MSL_F1(name, expr) template <detail::fpv A> inline auto name(const A& a) { return detail::map1(a, [](float x0) { const float x = msl_in(x0); return expr; }); }
#if defined(MSL_HOSTILE) && MSL_HOSTILE > 1
inline float msl_in(float x) { return __builtin_isfinite(x) ? x : __builtin_nanf(""); }
#else
inline float msl_in(float x) { return x; }
#endif
namespace fast {
#if defined(MSL_HOSTILE)
inline float msl_in(float x) { return __builtin_isfinite(x) ? x : __builtin_nanf(""); }
#else
inline float msl_in(float x) { return x; }
#endif
}  // namespace fast
namespace precise { inline float msl_in(float x) { return x; } }
#define MSL_MATH                                                                                   \
  MSL_F1(exp, __builtin_expf(x)) MSL_F1(exp2, __builtin_exp2f(x)) MSL_F1(exp10, __builtin_powf(10.0f, x)) \
  MSL_F1(log, __builtin_logf(x)) MSL_F1(log2, __builtin_log2f(x)) MSL_F1(log10, __builtin_log10f(x)) \
  MSL_F1(sqrt, __builtin_sqrtf(x)) MSL_F1(rsqrt, 1.0f / __builtin_sqrtf(x))                        \
  MSL_F1(sin, __builtin_sinf(x)) MSL_F1(cos, __builtin_cosf(x)) MSL_F1(tan, __builtin_tanf(x))     \
  MSL_F1(asin, __builtin_asinf(x)) MSL_F1(acos, __builtin_acosf(x)) MSL_F1(atan, __builtin_atanf(x)) \
  MSL_F1(sinh, __builtin_sinhf(x)) MSL_F1(cosh, __builtin_coshf(x)) MSL_F1(tanh, __builtin_tanhf(x)) \
  MSL_F1(asinh, __builtin_asinhf(x)) MSL_F1(acosh, __builtin_acoshf(x)) MSL_F1(atanh, __builtin_atanhf(x)) \
  template <detail::fpv A> inline auto pow(const A& a, const A& b) { return detail::map2(a, b, [](float x, float y) { return __builtin_powf(x, y); }); } \
  template <detail::fpv A> inline auto powr(const A& a, const A& b) { return detail::map2(a, b, [](float x, float y) { return __builtin_powf(x, y); }); } \
  template <detail::fpv A> inline auto divide(const A& a, const A& b) { return detail::map2(a, b, [](float x, float y) { return x / y; }); } \
  template <detail::fpv A> inline auto atan2(const A& a, const A& b) { return detail::map2(a, b, [](float x, float y) { return __builtin_atan2f(x, y); }); }
MSL_MATH
namespace fast { MSL_MATH }
namespace precise { MSL_MATH }
MSL_F1(floor, __builtin_floorf(x)) MSL_F1(ceil, __builtin_ceilf(x)) MSL_F1(trunc, __builtin_truncf(x))
MSL_F1(round, __builtin_roundf(x)) MSL_F1(rint, __builtin_rintf(x)) MSL_F1(fract, x - __builtin_floorf(x))
MSL_F1(fabs, __builtin_fabsf(x)) MSL_F1(sign, (x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f))
MSL_F1(sinpi, __builtin_sinf(3.14159265358979f * x)) MSL_F1(cospi, __builtin_cosf(3.14159265358979f * x))
MSL_F1(saturate, (x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f))
#undef MSL_MATH
#undef MSL_F1
#define MSL_B1(name, expr) template <detail::fpv A> inline auto name(const A& a) { return detail::map1b(a, [](float x) { return expr; }); }
MSL_B1(isnan, __builtin_isnan(x)) MSL_B1(isinf, __builtin_isinf(x)) MSL_B1(isfinite, __builtin_isfinite(x))
MSL_B1(isnormal, __builtin_isnormal(x)) MSL_B1(signbit, __builtin_signbit(x))
#undef MSL_B1
#define MSL_F2(name, expr) template <detail::fpv A> inline auto name(const A& a, const A& b) { return detail::map2(a, b, [](float x, float y) { return expr; }); }
MSL_F2(fmod, __builtin_fmodf(x, y)) MSL_F2(copysign, __builtin_copysignf(x, y)) MSL_F2(fdim, __builtin_fdimf(x, y))
MSL_F2(fmin, __builtin_fminf(x, y)) MSL_F2(fmax, __builtin_fmaxf(x, y)) MSL_F2(step, (y < x ? 0.0f : 1.0f))
#undef MSL_F2
template <detail::fpv A> inline auto fma(const A& a, const A& b, const A& c) {
  return detail::map3(a, b, c, [](float x, float y, float z) { return __builtin_fmaf(x, y, z); });
}
template <detail::fpv A> inline auto mix(const A& a, const A& b, const A& t) { return A(a + (b - a) * t); }
template <detail::fpv A> inline A smoothstep(const A& e0, const A& e1, const A& x) {
  A t = saturate(A((x - e0) / (e1 - e0)));
  return A(t * t * (A(3) - A(2) * t));
}
template <class T> concept any_num = msl::scalar_<T> || (msl::vn<T> > 0);
template <any_num A> inline auto min(const A& a, const A& b) {
  return detail::map2(a, b, [](auto x, auto y) { if constexpr (msl::is_fp<decltype(x)>) return __builtin_fminf(float(x), float(y)); else return y < x ? y : x; });
}
template <any_num A> inline auto max(const A& a, const A& b) {
  return detail::map2(a, b, [](auto x, auto y) { if constexpr (msl::is_fp<decltype(x)>) return __builtin_fmaxf(float(x), float(y)); else return x < y ? y : x; });
}
template <any_num A> inline auto min3(const A& a, const A& b, const A& c) { return min(min(a, b), c); }
template <any_num A> inline auto max3(const A& a, const A& b, const A& c) { return max(max(a, b), c); }
template <any_num A> inline auto clamp(const A& x, const A& lo, const A& hi) { return min(max(x, lo), hi); }
template <any_num A> requires(msl::vn<A> > 0) inline auto min(const A& a, msl::ve<A> b) { return min(a, A(b)); }
template <any_num A> requires(msl::vn<A> > 0) inline auto max(const A& a, msl::ve<A> b) { return max(a, A(b)); }
template <any_num A> requires(msl::vn<A> > 0) inline auto clamp(const A& x, msl::ve<A> lo, msl::ve<A> hi) { return clamp(x, A(lo), A(hi)); }
template <any_num A> inline A abs(const A& a) {
  if constexpr (msl::vn<A> > 0) { A r; for (int i = 0; i < msl::vn<A>; i++) r.set(i, abs(a.get(i))); return r; }
  else if constexpr (msl::is_fp<A>) return A(__builtin_fabsf(float(a)));
  else if constexpr (std::is_unsigned_v<A>) return a;
  else return a < 0 ? A(-a) : a;
}
template <class A> requires(msl::scalar_<A>) inline A select(A a, A b, bool c) { return c ? b : a; }
template <class T, int N> inline vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) {
  vec<T, N> r; for (int i = 0; i < N; i++) r.set(i, c.get(i) ? b.get(i) : a.get(i)); return r;
}
template <int N> inline bool any(const vec<bool, N>& v) { for (int i = 0; i < N; i++) if (v.get(i)) return true; return false; }
template <int N> inline bool all(const vec<bool, N>& v) { for (int i = 0; i < N; i++) if (!v.get(i)) return false; return true; }
inline bool any(bool b) { return b; }
inline bool all(bool b) { return b; }
template <any_num A> inline auto mad(const A& a, const A& b, const A& c) { return A(a * b + c); }
template <class A> using vec_of = vec<msl::ve<A>, msl::vn<A>>;  // a swizzle's vector type
template <class A, class B> concept same_vec = msl::vn<A> > 0 && msl::vn<A> == msl::vn<B> && std::is_same_v<msl::ve<A>, msl::ve<B>>;
template <class A, class B> concept mixed_vec = same_vec<A, B> && !std::is_same_v<A, B>;
template <class A, class B> requires mixed_vec<A, B> inline auto min(const A& a, const B& b) { return min(vec_of<A>(a), vec_of<A>(b)); }
template <class A, class B> requires mixed_vec<A, B> inline auto max(const A& a, const B& b) { return max(vec_of<A>(a), vec_of<A>(b)); }
template <class A, class B> requires same_vec<A, B> inline auto dot(const A& a, const B& b) {
  using T = msl::ve<A>; T s = T(a.get(0) * b.get(0));
  for (int i = 1; i < msl::vn<A>; i++) s = T(s + T(a.get(i) * b.get(i)));
  return s;
}
template <class A> requires(msl::vn<A> > 0) inline auto length_squared(const A& a) { return dot(a, a); }
template <class A> requires(msl::vn<A> > 0) inline auto length(const A& a) { return msl::ve<A>(__builtin_sqrtf(float(dot(a, a)))); }
template <class A, class B> requires same_vec<A, B> inline auto distance(const A& a, const B& b) { return length(a - b); }
template <class A> requires(msl::vn<A> > 0) inline auto normalize(const A& a) { return a / length(a); }
template <class A, class B> requires(same_vec<A, B> && msl::vn<A> == 3) inline auto cross(const A& a, const B& b) {
  return vec_of<A>(a.get(1) * b.get(2) - a.get(2) * b.get(1), a.get(2) * b.get(0) - a.get(0) * b.get(2), a.get(0) * b.get(1) - a.get(1) * b.get(0));
}

// Integer functions
namespace detail {
template <class A, class F> A imap(A a, F f) {
  if constexpr (msl::vn<A> == 0) return A(f(a));
  else { A r; for (int i = 0; i < msl::vn<A>; i++) r.set(i, msl::ve<A>(f(a.get(i)))); return r; }
}
}  // namespace detail
template <class A> inline A popcount(A a) { return detail::imap(a, [](auto x) { return __builtin_popcountll(std::make_unsigned_t<decltype(x)>(x)); }); }
template <class A> inline A clz(A a) { return detail::imap(a, [](auto x) { using U = std::make_unsigned_t<decltype(x)>; return U(x) ? __builtin_clzll(U(x)) - (64 - 8 * int(sizeof(x))) : 8 * int(sizeof(x)); }); }
template <class A> inline A ctz(A a) { return detail::imap(a, [](auto x) { using U = std::make_unsigned_t<decltype(x)>; return U(x) ? __builtin_ctzll(U(x)) : 8 * int(sizeof(x)); }); }
template <class A> inline A reverse_bits(A a) {
  return detail::imap(a, [](auto x) { using U = std::make_unsigned_t<decltype(x)>; U u = U(x), r = 0; for (unsigned i = 0; i < 8 * sizeof(U); i++) { r = U((r << 1) | (u & 1)); u = U(u >> 1); } return r; });
}
template <class T> requires std::integral<T> inline T extract_bits(T x, uint off, uint bits) {
  if (bits == 0) return 0;
  using U = std::make_unsigned_t<T>; const int w = 8 * sizeof(T);
  return T(T(U(U(x) << (w - off - bits))) >> (w - bits));
}
template <class T> requires std::integral<T> inline T insert_bits(T base, T ins, uint off, uint bits) {
  using U = std::make_unsigned_t<T>; U m = bits >= 8 * sizeof(T) ? U(~U(0)) : U((U(1) << bits) - 1);
  return T((U(base) & U(~U(m << off))) | U((U(ins) & m) << off));
}
template <class T> requires std::integral<T> inline T rotate(T x, T n) {
  using U = std::make_unsigned_t<T>; const uint w = 8 * sizeof(T), k = uint(n) % w; U u = U(x);
  return k ? T(U(u << k) | U(u >> (w - k))) : x;
}
template <class T> requires std::integral<T> inline std::make_unsigned_t<T> absdiff(T a, T b) { using U = std::make_unsigned_t<T>; return a > b ? U(U(a) - U(b)) : U(U(b) - U(a)); }
template <class T> requires std::integral<T> inline T mulhi(T a, T b) { return T((__int128(a) * __int128(b)) >> (8 * sizeof(T))); }
template <class T> requires std::integral<T> inline T mul24(T a, T b) { return T(a * b); }
template <class T> requires std::integral<T> inline T mad24(T a, T b, T c) { return T(a * b + c); }
template <class T> requires std::integral<T> inline T addsat(T a, T b) { __int128 s = __int128(a) + b; return s > std::numeric_limits<T>::max() ? std::numeric_limits<T>::max() : s < std::numeric_limits<T>::min() ? std::numeric_limits<T>::min() : T(s); }
template <class T> requires std::integral<T> inline T subsat(T a, T b) { __int128 s = __int128(a) - b; return s > std::numeric_limits<T>::max() ? std::numeric_limits<T>::max() : s < std::numeric_limits<T>::min() ? std::numeric_limits<T>::min() : T(s); }
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline half ldexp(half x, int e) { return half(__builtin_ldexpf(float(x), e)); }
inline float frexp(float x, int& e) { return __builtin_frexpf(x, &e); }
inline float modf(float x, float& ip) { return __builtin_modff(x, &ip); }
inline int ilogb(float x) { return __builtin_ilogbf(x); }

}  // namespace metal
