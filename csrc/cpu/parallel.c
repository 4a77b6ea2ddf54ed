/* Schedules tasks dynamically, because experts have very different numbers of rows. One task writes
 * each output, so results do not depend on the order of execution. */
#include <stdatomic.h>

#include "cpu/cpu.h"

typedef struct handout {
  atomic_llong next;
  int64_t count;
  moelora_cpu_task task;
  void *context;
} handout;

static void work(void *context, int64_t begin, int64_t end) {
  handout *tasks = context;
  for (int64_t worker = begin; worker < end; worker++) {
    int64_t index;
    while ((index = atomic_fetch_add_explicit(&tasks->next, 1, memory_order_relaxed)) <
           tasks->count)
      tasks->task(tasks->context, index, (int32_t)worker);
  }
}

/* Minimum number of elements per thread: reading them takes ten microseconds, about as long as
 * waking a thread and waiting for it. */
enum { ELEMENTS_PER_WORKER = 1 << 16 };

void moelora_cpu_parallel(const moelora_exec *exec, int64_t count, double elements,
                          moelora_cpu_task task, void *context) {
  handout tasks = {.count = count, .task = task, .context = context};
  atomic_init(&tasks.next, 0);
  int64_t workers = moelora_min(moelora_workers(exec), count);
  if (elements < (double)workers * ELEMENTS_PER_WORKER)
    workers = (int64_t)(elements / ELEMENTS_PER_WORKER);
  if (workers > 1)
    exec->parallel_for(workers, work, &tasks);
  else
    work(&tasks, 0, 1);
}
