// Spans of packed tokens that each carry something along.
namespace arriero {

struct Span {
  int first;   // token, on the packed axis
  int length;  // tokens
  int stop;    // where its stops are in the table: numbers of tokens, rising, after which what it carries is kept
  int stops;
};

}  // namespace arriero

// Arguments of up to 8 spans, which end in their numbers.
#if SPANS == 1
#define EACH(type, name) (type*)name##0
#else
#define EACH(type, name)                                                                              \
  (type*)name##0, (type*)name##1, (type*)name##2, (type*)name##3, (type*)name##4, (type*)name##5, \
      (type*)name##6, (type*)name##7
#endif
