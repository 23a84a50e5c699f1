// Causal depthwise convolution over spans of rows, each behind its own tail of earlier rows, and the tails for later.
//
// y[t] = sum over j of w[j] * x[t - (TAPS - 1 - j) * dilation] for each channel, plus bias (BIAS), then SiLU (SILU).
// x, y [rows, channels] of T; w [TAPS, channels] of W, bias [channels] of B; dims = channels, rows, dilation.
// Span s holds rows edges[s] to edges[s + 1], and tails [spans, history, channels] of T the history = (TAPS - 1) *
// dilation rows before it. kept [cuts, history, channels] of T: the last rows of span cuts[2 i] after cuts[2 i + 1] of it.
//
// Template: T, W, B, TAPS, BIAS, SILU. Grid (channels, rows + cuts * history, 1): a thread makes one number of y or kept.
//: inputs x w bias tails edges cuts dims
//: outputs y kept
//: include gates.h
//: body
  const int channels = dims[0], rows = dims[1], dilation = dims[2], history = (TAPS - 1) * dilation;
  const int line = thread_position_in_grid.y;
  const size_t channel = thread_position_in_grid.x;
  if (line < rows) {
    int span = 0;
    while (line >= edges[span + 1]) ++span;
    const int at = line - edges[span];
    float sum = 0.0f;
    for (int j = 0; j < TAPS; ++j) {
      const int from = at - (TAPS - 1 - j) * dilation;
      const float one = from < 0 ? float(tails[size_t(span * history + history + from) * channels + channel])
                                 : float(x[size_t(edges[span] + from) * channels + channel]);
      sum += one * float(W(w[j * channels + channel]));
    }
    if (BIAS) sum += float(B(bias[channel]));
    if (SILU) sum = silu(sum);
    y[size_t(line) * channels + channel] = T(sum);
  } else {
    const int cut = (line - rows) / history, span = cuts[2 * cut];
    const int from = cuts[2 * cut + 1] + (line - rows) % history - history;
    const T one = from < 0 ? T(tails[size_t(span * history + history + from) * channels + channel])
                           : T(x[size_t(edges[span] + from) * channels + channel]);
    kept[size_t(line - rows) * channels + channel] = one;
  }
