/* What the environment variable MOELORA_LOG asks for: the one place that knows its words. */
#ifndef MOELORA_CORE_LOG_H
#define MOELORA_CORE_LOG_H

typedef enum moelora_log_level {
  MOELORA_LOG_NOTHING = 0,
  MOELORA_LOG_PLAN,   /* what every gemm and layer runs, and why */
  MOELORA_LOG_SHAPES, /* also the arguments of every call, which the Python layer prints */
} moelora_log_level;

/* Read once per process; a word that is none is told on stderr then, and asks for nothing. */
moelora_log_level moelora_log(void);

#endif
