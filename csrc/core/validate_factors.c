/* Validates the LoRA factors of a projection. */
#include "core/check.h"

/* Checks a factor [max_loras, E or 1, *, *] of the dtype of `like`. */
static moelora_status check_factor(moelora_arg arg, moelora_arg like, const moelora_factors_arg *of,
                                   const char *layout, moelora_factor *factor) {
  const moelora_tensor *t = arg.tensor;
  MOELORA_TRY(moelora_check_view(arg, 4, layout));
  MOELORA_TRY(moelora_check_dtype(arg, like.tensor->dtype, like.name));
  MOELORA_TRY(moelora_check_at_least_one(arg));
  MOELORA_REQUIRE(t->size[1] == 1 || t->size[1] == of->num_experts,
                  "%s.size(1) is %lld, %s is %lld: expected as many experts, or 1 factor shared by "
                  "all",
                  moelora_label_of(arg).text, (long long)t->size[1],
                  moelora_label_source(of->experts_source).text, (long long)of->num_experts);
  MOELORA_TRY(moelora_check_rows(arg));
  *factor = (moelora_factor){
      .data = t->data,
      .stride_l = moelora_stride(t, 0),
      .stride_e = t->size[1] == 1 ? 0 : t->stride[1],
      .stride_i = moelora_stride(t, 2),
  };
  return MOELORA_OK;
}

moelora_status moelora_check_factors(const moelora_factors_arg *of, int64_t *max_loras,
                                     moelora_source source, moelora_factors *factors) {
  const moelora_lora *lora = of->lora;
  const moelora_tensor *leading = of->shrink ? &lora->a[0] : &lora->b[0];
  const moelora_arg first = MOELORA_ARG(of->shrink ? of->name_a : of->name_b, leading);
  const moelora_source rank = moelora_words("the rank of the first slice");
  const int32_t slices = lora->num_slices;
  MOELORA_REQUIRE(slices >= of->least && slices <= of->most,
                  "%s has %d slices, expected %d to %d%s", first.name, slices, of->least, of->most,
                  of->slices ? of->slices : "");
  if (slices == 0)
    return MOELORA_OK;
  const bool defines_n = of->n == MOELORA_ANY_SIZE;
  moelora_source columns =
      defines_n ? moelora_words("the columns of the first slice") : of->n_source;
  columns.slices = defines_n ? 1 : slices;
  MOELORA_REQUIRE(defines_n || of->n % slices == 0,
                  "%s is %lld, expected a multiple of the %d slices of %s",
                  moelora_label_source(of->n_source).text, (long long)of->n, slices, first.name);
  const bool is_wide = of->may_be_wide && of->like.tensor->dtype != MOELORA_F32 &&
                       !moelora_is_absent(leading) && leading->dtype == MOELORA_F32;
  const moelora_arg like = is_wide ? first : of->like;
  factors->num_slices = slices;
  factors->wide = is_wide;
  for (int32_t i = 0; i < slices; i++) {
    const moelora_arg a = moelora_entry(of->name_a, i, &lora->a[i]);
    const moelora_arg b = moelora_entry(of->name_b, i, &lora->b[i]);
    if (of->shrink)
      MOELORA_TRY(check_factor(a, like, of, "[max_loras, E or 1, R, K]", &factors->a[i]));
    if (of->expand)
      MOELORA_TRY(check_factor(b, like, of, "[max_loras, E or 1, N, R]", &factors->b[i]));
    if (i == 0) {
      factors->max_rank = (int32_t)leading->size[of->shrink ? 2 : 3];
      factors->slice_n = !of->expand ? 0 : defines_n ? b.tensor->size[2] : of->n / slices;
    }
    if (*max_loras == MOELORA_ANY_SIZE)
      *max_loras = leading->size[0];
    MOELORA_REQUIRE(*max_loras < INT32_MAX, "%s[0].size(0) is %lld, expected fewer slots",
                    first.name, (long long)*max_loras);
    if (of->shrink) {
      MOELORA_TRY(moelora_check_size(a, 0, *max_loras, source));
      MOELORA_TRY(moelora_check_size(a, 2, factors->max_rank, rank));
      MOELORA_TRY(moelora_check_size(a, 3, of->k, of->k_source));
    }
    if (of->expand) {
      MOELORA_TRY(moelora_check_size(b, 0, *max_loras, source));
      MOELORA_TRY(moelora_check_size(b, 3, factors->max_rank, rank));
      MOELORA_TRY(moelora_check_size(b, 2, factors->slice_n, columns));
    }
  }
  return MOELORA_OK;
}
