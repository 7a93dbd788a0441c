use proptest::prelude::*;

use super::*;

/// The same cache, written as plainly as possible: a list of held paths.
#[derive(Default)]
struct Naive {
    page: usize,
    clock: u64,
    /// Path from the root, tokens of it that are the node's own, last use, locks.
    nodes: Vec<(Vec<u32>, usize, u64, u32)>,
}

impl Naive {
    fn find(&mut self, tokens: &[u32]) -> usize {
        self.clock += 1;
        let best = self
            .nodes
            .iter()
            .map(|(path, ..)| {
                let same = path.iter().zip(tokens).take_while(|(a, b)| a == b).count();
                same - same % self.page
            })
            .max()
            .unwrap_or(0);
        // A node that the match ends within is cut there.
        let cut = self.nodes.iter().position(|(path, own, ..)| {
            path.len() > best && path.len() - own < best && path[..best] == tokens[..best]
        });
        if let Some(at) = cut {
            let (path, own, used, locks) = self.nodes[at].clone();
            let upper = own - (path.len() - best);
            self.nodes[at].1 = path.len() - best;
            self.nodes.push((path[..best].to_vec(), upper, used, locks));
        }
        for (path, _, used, _) in &mut self.nodes {
            if path.len() <= best && path[..] == tokens[..path.len()] {
                *used = self.clock;
            }
        }
        best
    }

    fn insert(&mut self, tokens: &[u32]) -> usize {
        let tokens = &tokens[..tokens.len() - tokens.len() % self.page];
        let best = self.find(tokens);
        if best < tokens.len() {
            self.nodes
                .push((tokens.to_vec(), tokens.len() - best, self.clock, 0));
        }
        tokens.len()
    }

    fn lock(&mut self, path: &[u32], by: i32) {
        for (held, _, _, locks) in &mut self.nodes {
            if held.len() <= path.len() && held[..] == path[..held.len()] {
                *locks = locks.checked_add_signed(by).unwrap();
            }
        }
    }

    fn evict(&mut self, tokens: usize) -> usize {
        let mut freed = 0;
        while freed < tokens {
            let leaf = (0..self.nodes.len())
                .filter(|&i| {
                    let (path, _, _, locks) = &self.nodes[i];
                    *locks == 0
                        && !self
                            .nodes
                            .iter()
                            .any(|(p, ..)| p.len() > path.len() && p[..path.len()] == path[..])
                })
                .min_by_key(|&i| self.nodes[i].2);
            let Some(leaf) = leaf else { break };
            freed += self.nodes.remove(leaf).1;
        }
        freed
    }

    fn held(&self, locked: bool) -> usize {
        self.nodes
            .iter()
            .filter(|(.., locks)| (*locks > 0) == locked)
            .map(|(_, own, ..)| own)
            .sum()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Find(Vec<u32>),
    Insert(Vec<u32>),
    Lock(Vec<u32>),
    Unlock(prop::sample::Index),
    Evict(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    // Three ids only, so that prefixes are shared and cut all the time.
    let tokens = || proptest::collection::vec(0_u32..3, 0..14);
    let op = prop_oneof![
        2 => tokens().prop_map(Op::Find),
        4 => tokens().prop_map(Op::Insert),
        2 => tokens().prop_map(Op::Lock),
        2 => any::<prop::sample::Index>().prop_map(Op::Unlock),
        1 => (1_usize..20).prop_map(Op::Evict),
    ];
    proptest::collection::vec(op, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn it_behaves_like_the_plain_one(page in 1_usize..4, ops in ops()) {
        let mut real = RadixCache::new(page);
        let mut naive = Naive { page, ..Naive::default() };
        let mut locked: Vec<(NodeId, Vec<u32>)> = Vec::new();
        for op in ops {
            match op {
                Op::Find(tokens) => {
                    prop_assert_eq!(real.peek("", &tokens), naive.find(&tokens));
                    real.find("", &tokens);
                }
                Op::Insert(tokens) => {
                    prop_assert_eq!(real.insert("", &tokens).tokens, naive.insert(&tokens));
                }
                Op::Lock(tokens) => {
                    let found = real.find("", &tokens);
                    prop_assert_eq!(found.tokens, naive.find(&tokens));
                    let path = tokens[..found.tokens].to_vec();
                    real.lock(found.node);
                    naive.lock(&path, 1);
                    locked.push((found.node, path));
                }
                Op::Unlock(which) => {
                    if !locked.is_empty() {
                        let (node, path) = locked.swap_remove(which.index(locked.len()));
                        real.unlock(node);
                        naive.lock(&path, -1);
                    }
                }
                Op::Evict(tokens) => {
                    prop_assert_eq!(real.evict(tokens), naive.evict(tokens));
                }
            }
            prop_assert_eq!(real.protected(), naive.held(true));
            prop_assert_eq!(real.evictable(), naive.held(false));
            for (_, path) in &locked {
                prop_assert_eq!(real.peek("", path), path.len());
            }
        }
        for (node, _) in locked {
            real.unlock(node);
        }
        prop_assert_eq!(real.protected(), 0);
        let rest = real.evictable();
        prop_assert_eq!(real.clear(), rest);
        prop_assert_eq!(real.evictable(), 0);
    }
}

#[test]
fn namespaces_share_nothing_and_leave_nothing() {
    let mut cache = RadixCache::new(1);
    cache.insert("", &[1, 2, 3]);
    cache.insert("salt", &[1, 2, 3, 4]);
    assert_eq!(cache.peek("", &[1, 2, 3, 4]), 3);
    assert_eq!(cache.peek("salt", &[1, 2, 3, 4]), 4);
    assert_eq!(cache.peek("other", &[1, 2, 3]), 0);
    cache.clear();
    assert!(cache.roots.is_empty());
    assert_eq!(cache.free.len(), cache.nodes.len());
}

#[test]
fn the_least_recently_used_leaf_goes_first() {
    let mut cache = RadixCache::new(1);
    cache.insert("", &[1, 1, 1]);
    cache.insert("", &[2, 2]);
    cache.insert("", &[1, 1, 5]);
    cache.find("", &[2, 2]);
    assert_eq!(cache.evict(1), 1);
    assert_eq!(cache.peek("", &[1, 1, 1]), 2);
    assert_eq!(cache.peek("", &[1, 1, 5]), 3);
    assert_eq!(cache.peek("", &[2, 2]), 2);
}
