/* Parses the environment variable MOELORA_LOG. */
#pragma once

typedef enum moelora_log_level {
  MOELORA_LOG_NOTHING = 0,
  MOELORA_LOG_PLAN,   /* kernels and launch parameters of every call */
  MOELORA_LOG_SHAPES, /* also the arguments of every call, printed by the Python layer */
} moelora_log_level;

/* Returns the level, read once per process. An unknown value is reported and disables logging. */
moelora_log_level moelora_log(void);
