/* Plans the backward of a layer. */
#include "core/plan.h"

moelora_status moelora_plan_experts_backward(const moelora_experts_backward_problem *problem,
                                             const moelora_device_info *device,
                                             moelora_backward_plan *plan) {
  *plan = (moelora_backward_plan){0};
  return moelora_plan_cpu(problem->forward.dtype, device, &plan->variant);
}
