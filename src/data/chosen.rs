//! What Python's `random.Random(seed).sample` chooses: upstream draws pairs with it.
//!
//! Mersenne Twister (Matsumoto and Nishimura, 1998), and `Random.sample` of CPython 3.12.

/// Numbers of the generator's state.
const STATE: usize = 624;
/// The distance of the numbers that make a new one.
const MIDDLE: usize = 397;

/// A generator of random numbers.
pub(super) struct Twister {
    state: Vec<u32>,
    next: usize,
}

impl Twister {
    /// Seeded as `random.Random` seeds an integer: by an array of its words of 32 bits, the lowest first.
    pub fn new(seed: u64) -> Twister {
        let words = [seed as u32, (seed >> 32) as u32];
        let words = &words[..if words[1] == 0 { 1 } else { 2 }];
        let mut state = vec![19_650_218_u32];
        let mixed = |before: u32| before ^ (before >> 30);
        for i in 1..STATE {
            let before = mixed(state[i - 1]).wrapping_mul(1_812_433_253);
            state.push(before.wrapping_add(i as u32));
        }
        let mut at = 1;
        let mut advance = |state: &mut Vec<u32>, factor: u32, added: &dyn Fn(usize) -> u32| {
            let product = mixed(state[at - 1]).wrapping_mul(factor);
            state[at] = (state[at] ^ product).wrapping_add(added(at));
            at += 1;
            if at == STATE {
                state[0] = state[STATE - 1];
                at = 1;
            }
        };
        for (word, number) in words.iter().zip(0u32..).cycle().take(STATE) {
            advance(&mut state, 1_664_525, &|_| word.wrapping_add(number));
        }
        for _ in 1..STATE {
            advance(&mut state, 1_566_083_941, &|at| (at as u32).wrapping_neg());
        }
        state[0] = 1 << 31;
        Twister { state, next: STATE }
    }

    /// The numbers of `most` of `count` items, or of all of them, in the order in which they are drawn.
    pub fn sample(&mut self, count: usize, most: usize) -> Vec<usize> {
        let most = most.min(count);
        // Above this, numbers are drawn again that were drawn before.
        let mut pooled = 21;
        if most > 5 {
            let mut power = 1;
            while power < 3 * most {
                power *= 4;
            }
            pooled += power;
        }
        if count > pooled {
            let mut drawn = Vec::with_capacity(most);
            while drawn.len() < most {
                let number = self.below(count);
                if !drawn.contains(&number) {
                    drawn.push(number);
                }
            }
            return drawn;
        }
        let mut pool: Vec<usize> = (0..count).collect();
        let draws = (0..most).map(|_| pool.swap_remove(self.below(pool.len())));
        draws.collect()
    }

    fn twist(&mut self) {
        for i in 0..STATE {
            let both = (self.state[i] & (1 << 31)) | (self.state[(i + 1) % STATE] & !(1 << 31));
            let odd = if both & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + MIDDLE) % STATE] ^ (both >> 1) ^ odd;
        }
        self.next = 0;
    }

    fn next(&mut self) -> u32 {
        if self.next == STATE {
            self.twist();
        }
        let mut number = self.state[self.next];
        self.next += 1;
        number ^= number >> 11;
        number ^= (number << 7) & 0x9d2c_5680;
        number ^= (number << 15) & 0xefc6_0000;
        number ^ (number >> 18)
    }

    /// A number below `count`, which is not 0.
    fn below(&mut self, count: usize) -> usize {
        let bits = usize::BITS - count.leading_zeros();
        loop {
            let number = (self.next() >> (32 - bits)) as usize;
            if number < count {
                return number;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `random.Random(seed).sample(range(count), min(most, count))` of CPython 3.11.
    #[test]
    fn items_are_those_of_python() {
        for (seed, count, most, expected) in [
            (0, 7, 5, &[6, 3, 5, 0, 1][..]),
            (0, 3, 5, &[1, 2, 0][..]),
            (0, 5, 5, &[3, 4, 0, 1, 2][..]),
            (0, 21, 5, &[12, 13, 1, 8, 16][..]),
            (0, 22, 5, &[12, 13, 1, 8, 16][..]),
            (0, 400, 5, &[197, 388, 215, 20, 132][..]),
            (5_000_000_000, 21, 5, &[2, 19, 0, 15, 9][..]),
            (7, 40, 9, &[20, 9, 25, 3, 4, 34, 6, 23, 36][..]),
            (
                1,
                1000,
                12,
                &[137, 582, 867, 821, 782, 64, 261, 120, 507, 779, 460, 483][..],
            ),
        ] {
            let found = Twister::new(seed).sample(count, most);
            assert_eq!(found, expected, "{seed} {count} {most}");
        }
    }

    /// The same with one generator: `random.seed(1)`, and `random.sample` for each count.
    #[test]
    fn samples_of_one_generator_follow_each_other() {
        let mut random = Twister::new(1);
        let found = [3, 1, 9, 30, 2].map(|count| random.sample(count, 5));
        assert_eq!(
            found,
            [
                vec![0, 2, 1],
                vec![0],
                vec![7, 8, 3, 5, 6],
                vec![25, 6, 3, 15, 0],
                vec![1, 0]
            ]
        );
    }
}
