//! A rank's prefix cache: a radix tree over sequences in whole pages.
//!
//! It guarantees: what is found was inserted before under the same namespace,
//! token by token; a locked node is never evicted; eviction takes the least
//! recently used leaf, whole, until enough is free; `evictable` and `protected`
//! always add up to the tokens held.
//!
//! A prompt is copied once, when it is inserted; splitting moves, matching
//! copies nothing.

use std::collections::{BTreeSet, HashMap};

use super::text::Label;

/// The cache of an engine that serves: over token ids.
pub type RadixCache = RadixTree<Vec<u32>>;

/// A node's place in the arena. Stays valid while the node is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u32);

/// The longest prefix that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Its length: a multiple of the page size.
    pub tokens: usize,
    /// Where it ends. The namespace's root where nothing is held.
    pub node: NodeId,
}

#[derive(Debug)]
struct Node<L: Label> {
    /// The tokens between the parent and here; empty for a root.
    tokens: L,
    parent: Option<NodeId>,
    /// By the first page of their tokens.
    children: HashMap<L::Key, NodeId>,
    locks: u32,
    used: u64,
    /// Where it stands in the order of eviction, if it does.
    listed: Option<u64>,
    namespace: Option<Box<str>>,
}

/// The cache of one rank.
#[derive(Debug)]
pub struct RadixTree<L: Label> {
    page: usize,
    nodes: Vec<Option<Node<L>>>,
    free: Vec<NodeId>,
    roots: HashMap<Box<str>, NodeId>,
    /// Unlocked leaves, the least recently used first.
    leaves: BTreeSet<(u64, NodeId)>,
    /// Counts uses: later is greater.
    clock: u64,
    evictable: usize,
    protected: usize,
    evicted: u64,
}

impl<L: Label> RadixTree<L> {
    /// An empty one. A page of 0 is taken as 1.
    pub fn new(page: usize) -> Self {
        Self {
            page: page.max(1),
            nodes: Vec::new(),
            free: Vec::new(),
            roots: HashMap::new(),
            leaves: BTreeSet::new(),
            clock: 0,
            evictable: 0,
            protected: 0,
            evicted: 0,
        }
    }

    /// Tokens that eviction may free.
    pub fn evictable(&self) -> usize {
        self.evictable
    }

    /// Tokens that are locked.
    pub fn protected(&self) -> usize {
        self.protected
    }

    /// Tokens evicted ever.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// `tokens` cut down to whole pages.
    pub fn aligned(&self, tokens: usize) -> usize {
        tokens - tokens % self.page
    }

    /// The longest held prefix of `tokens`; counts as a use of it.
    pub fn find(&mut self, namespace: &str, tokens: L::View<'_>) -> Match {
        let root = self.root(namespace);
        self.clock += 1;
        self.touch(root);
        let mut at = Match {
            tokens: 0,
            node: root,
        };
        let len = L::view_len(tokens);
        loop {
            let rest = L::part(tokens, at.tokens, len);
            let Some(child) = self.child(at.node, rest) else {
                return at;
            };
            let shared = self.shared(child, rest);
            if shared < self.node(child).tokens.len() {
                // The end of a match is the end of a node, so that it can be
                // locked by itself.
                let upper = self.split(child, shared);
                self.touch(upper);
                at.node = upper;
                at.tokens += shared;
                return at;
            }
            self.touch(child);
            at.node = child;
            at.tokens += shared;
        }
    }

    /// The length of the longest held prefix. Changes nothing.
    pub fn peek(&self, namespace: &str, tokens: L::View<'_>) -> usize {
        let Some(&root) = self.roots.get(namespace) else {
            return 0;
        };
        let (mut node, mut held) = (root, 0);
        let len = L::view_len(tokens);
        loop {
            let rest = L::part(tokens, held, len);
            let Some(child) = self.child(node, rest) else {
                return held;
            };
            let shared = self.shared(child, rest);
            held += shared;
            if shared < self.node(child).tokens.len() {
                return held;
            }
            node = child;
        }
    }

    /// Holds the whole pages of `tokens`; counts as a use of them. What was
    /// not held before becomes evictable.
    pub fn insert(&mut self, namespace: &str, tokens: L::View<'_>) -> Match {
        let len = self.aligned(L::view_len(tokens));
        let tokens = L::part(tokens, 0, len);
        let found = self.find(namespace, tokens);
        if found.tokens == len {
            return found;
        }
        let rest = L::of(L::part(tokens, found.tokens, len));
        let first = rest.key(self.page);
        let id = self.allocate(Node {
            tokens: rest,
            parent: Some(found.node),
            children: HashMap::new(),
            locks: 0,
            used: self.clock,
            listed: None,
            namespace: None,
        });
        self.node_mut(found.node).children.insert(first, id);
        self.evictable += len - found.tokens;
        self.relist(found.node);
        self.relist(id);
        Match {
            tokens: len,
            node: id,
        }
    }

    /// Keeps everything from the root to `node` until it is unlocked as often
    /// as it was locked.
    pub fn lock(&mut self, node: NodeId) {
        let mut at = Some(node);
        while let Some(id) = at {
            let node = self.node_mut(id);
            node.locks += 1;
            let (first, len) = (node.locks == 1, node.tokens.len());
            at = node.parent;
            if first {
                self.evictable -= len;
                self.protected += len;
                self.relist(id);
            }
        }
    }

    /// Undoes one [`RadixTree::lock`].
    pub fn unlock(&mut self, node: NodeId) {
        let mut at = Some(node);
        while let Some(id) = at {
            let node = self.node_mut(id);
            debug_assert!(node.locks > 0, "unlocked more often than locked");
            node.locks = node.locks.saturating_sub(1);
            let (last, len) = (node.locks == 0, node.tokens.len());
            at = node.parent;
            if last {
                self.protected -= len;
                self.evictable += len;
                self.relist(id);
                let node = self.node(id);
                if node.parent.is_none() && node.children.is_empty() {
                    self.drop_root(id);
                }
            }
        }
    }

    /// Frees at least `tokens` tokens, or what can be freed. Returns how many
    /// it freed.
    pub fn evict(&mut self, tokens: usize) -> usize {
        let mut freed = 0;
        while freed < tokens {
            let Some((_, id)) = self.leaves.pop_first() else {
                break;
            };
            self.node_mut(id).listed = None;
            freed += self.remove_leaf(id);
        }
        self.evicted += freed as u64;
        freed
    }

    /// Drops everything that is not locked. Returns how many tokens that was.
    pub fn clear(&mut self) -> usize {
        let before = self.evicted;
        let freed = self.evict(usize::MAX);
        // A flush is not an eviction for want of room.
        self.evicted = before;
        freed
    }

    fn remove_leaf(&mut self, id: NodeId) -> usize {
        let Some(node) = self.nodes[id.0 as usize].take() else {
            return 0;
        };
        self.free.push(id);
        self.evictable -= node.tokens.len();
        if let Some(parent) = node.parent {
            let page = self.page;
            let first = node.tokens.key(page);
            self.node_mut(parent).children.remove(&first);
            self.relist(parent);
            let above = self.node(parent);
            if above.parent.is_none() && above.children.is_empty() && above.locks == 0 {
                self.drop_root(parent);
            }
        }
        node.tokens.len()
    }

    /// Namespaces come from requests: an empty one must not stay.
    fn drop_root(&mut self, root: NodeId) {
        if let Some(node) = self.nodes[root.0 as usize].take() {
            if let Some(namespace) = node.namespace {
                self.roots.remove(&namespace);
            }
            self.free.push(root);
        }
    }

    fn root(&mut self, namespace: &str) -> NodeId {
        if let Some(&root) = self.roots.get(namespace) {
            return root;
        }
        let root = self.allocate(Node {
            tokens: L::empty(),
            parent: None,
            children: HashMap::new(),
            locks: 0,
            used: self.clock,
            listed: None,
            namespace: Some(namespace.into()),
        });
        self.roots.insert(namespace.into(), root);
        root
    }

    /// Cuts a node in two: the returned one holds its first `at` tokens, the
    /// old id keeps the rest, so that whoever locked it still holds its end.
    fn split(&mut self, id: NodeId, at: usize) -> NodeId {
        let page = self.page;
        let node = self.node_mut(id);
        let lower = node.tokens.split_off(at);
        let upper_tokens = std::mem::replace(&mut node.tokens, lower);
        let upper_first = upper_tokens.key(page);
        let lower_first = node.tokens.key(page);
        let (parent, locks, used) = (node.parent, node.locks, node.used);
        let upper = self.allocate(Node {
            tokens: upper_tokens,
            parent,
            children: HashMap::from([(lower_first, id)]),
            locks,
            used,
            listed: None,
            namespace: None,
        });
        self.node_mut(id).parent = Some(upper);
        if let Some(parent) = parent {
            self.node_mut(parent).children.insert(upper_first, upper);
        }
        upper
    }

    fn child(&self, node: NodeId, rest: L::View<'_>) -> Option<NodeId> {
        if L::view_len(rest) < self.page {
            return None;
        }
        L::look_up(&self.node(node).children, rest, self.page)
    }

    /// Whole pages that `node` and `rest` have in common: at least one, since
    /// the node was found by its first.
    fn shared(&self, node: NodeId, rest: L::View<'_>) -> usize {
        self.aligned(self.node(node).tokens.shared(rest))
    }

    fn touch(&mut self, id: NodeId) {
        let clock = self.clock;
        self.node_mut(id).used = clock;
        self.relist(id);
    }

    /// Puts the node where it belongs in the order of eviction, or takes it out.
    fn relist(&mut self, id: NodeId) {
        let node = self.node_mut(id);
        let wanted = (node.locks == 0 && node.children.is_empty() && node.parent.is_some())
            .then_some(node.used);
        let listed = std::mem::replace(&mut node.listed, wanted);
        if listed == wanted {
            return;
        }
        if let Some(used) = listed {
            self.leaves.remove(&(used, id));
        }
        if let Some(used) = wanted {
            self.leaves.insert((used, id));
        }
    }

    fn allocate(&mut self, node: Node<L>) -> NodeId {
        if let Some(id) = self.free.pop() {
            self.nodes[id.0 as usize] = Some(node);
            return id;
        }
        let id = NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        self.nodes.push(Some(node));
        id
    }

    #[expect(
        clippy::expect_used,
        reason = "ids never leave this module but as locked or just found nodes"
    )]
    fn node(&self, id: NodeId) -> &Node<L> {
        self.nodes[id.0 as usize].as_ref().expect("a live node")
    }

    #[expect(
        clippy::expect_used,
        reason = "ids never leave this module but as locked or just found nodes"
    )]
    fn node_mut(&mut self, id: NodeId) -> &mut Node<L> {
        self.nodes[id.0 as usize].as_mut().expect("a live node")
    }
}

#[cfg(test)]
#[path = "radix_test.rs"]
mod tests;
