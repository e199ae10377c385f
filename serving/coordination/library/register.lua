-- What gateways may call. Each function takes one msgpack array and returns one; each is atomic.

redis.register_function('LIBRARY_admit', admit)
redis.register_function('LIBRARY_settle', settle)
redis.register_function('LIBRARY_timeout', timeout)
redis.register_function('LIBRARY_move', move)
redis.register_function('LIBRARY_beat', beat)
redis.register_function('LIBRARY_hello', hello)
redis.register_function('LIBRARY_restore', restore)
redis.register_function('LIBRARY_goodbye', goodbye)
redis.register_function('LIBRARY_correct', correct)
redis.register_function('LIBRARY_read', read)
redis.register_function('LIBRARY_wake', wake)
